#include "make_cache_reader.hpp"
#include "zoom_trace.hpp"

namespace sekv::example {

made_reader make_progressive_reader(const arguments& a, const llama_host& host, const cache_reader_options& options) {
    auto codec = a.progressive;
    if (!a.calibration.empty()) codec.prior = std::make_shared<calibration>(calibration::load(a.calibration, host.shape()));
    if (!a.trace_zooms.empty()) codec.observer = [trace = std::make_shared<zoom_trace>(a.trace_zooms, host.shape())](const zoom_event& e) { trace->add(e); };
    return {make_reader_of<progressive_codec>(a.stored, host, options, codec), 0};
}

made_reader make_cache_reader(const arguments& a, const llama_host& host, const cache_reader_options& options) {
    return a.method == preset::paper ? make_paper_reader(a, host, options) : make_progressive_reader(a, host, options);
}

}  // namespace sekv::example
