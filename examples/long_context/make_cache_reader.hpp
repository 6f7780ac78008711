// Chooses the cache's types at run time.
#pragma once

#include <cstdint>
#include <memory>

#include "arguments.hpp"
#include "cache_reader.hpp"

namespace sekv::example {

struct made_reader {
    std::unique_ptr<cache_reader> run;
    std::uint64_t learned_parameters = 0;
};

/// A reader of the preset and the stored type that `a` names. Throws what the cache and the files named by `a` throw.
[[nodiscard]] made_reader make_cache_reader(const arguments& a, const llama_host& host, const cache_reader_options& options);

/// One per preset, each in a file of its own: a cache takes long to compile.
[[nodiscard]] made_reader make_progressive_reader(const arguments& a, const llama_host& host, const cache_reader_options& options);
[[nodiscard]] made_reader make_paper_reader(const arguments& a, const llama_host& host, const cache_reader_options& options);

template <class Codec>
[[nodiscard]] std::unique_ptr<cache_reader> make_reader_of(kv_type stored, const llama_host& host, const cache_reader_options& options,
                                                           const typename Codec::options& codec) {
    switch (stored) {
        case kv_type::f32:
            return std::make_unique<sekv_reader<basic_cache<float, host_backend, Codec>>>(host, options, codec);
        case kv_type::f16:
            return std::make_unique<sekv_reader<basic_cache<fp16, host_backend, Codec>>>(host, options, codec);
        case kv_type::bf16:
            break;
    }
    return std::make_unique<sekv_reader<basic_cache<bf16, host_backend, Codec>>>(host, options, codec);
}

}  // namespace sekv::example
