#include "make_cache_reader.hpp"
#include "sekv/attend/paper.hpp"

namespace sekv::example {

made_reader make_paper_reader(const arguments& a, const llama_host& host, const cache_reader_options& options) {
    auto codec = a.paper;
    codec.router = std::make_shared<paper_weights>(a.router.empty() ? paper_weights::untrained(host.shape()) : paper_weights::load(a.router, host.shape()));
    return {make_reader_of<paper_codec>(a.stored, host, options, codec), codec.router->parameters()};
}

}  // namespace sekv::example
