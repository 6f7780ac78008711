// Decode attention over the full cache: ours to beat. Flash decoding in bf16 and FP8, and the two products alone by cuBLAS.
#include <cublas_v2.h>

#include <bit>
#include <cmath>

#include "bench/cuda/device.hpp"
#include "bench/cuda/full_kv.hpp"
#include "sekv/core/error.hpp"
#include "sekv/core/scalar.hpp"

namespace sekv::bench {
namespace {

int processors() {
    int device = 0, count = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

/// Keys, values and queries of one case, filled.
struct full_cache {
    full_cache(full_kv_step s, cudaStream_t stream) : step(s) {
        const std::int64_t rows = std::int64_t{step.batch} * step.kv_heads * step.tokens, elements = rows * full_kv_size, queries = std::int64_t{step.batch} * step.kv_heads * step.group * full_kv_size;
        const std::size_t size = step.stored == element::bf16 ? 2 : 1;
        keys = device_memory(static_cast<std::size_t>(elements) * size);
        values = device_memory(static_cast<std::size_t>(elements) * size);
        query = device_memory(static_cast<std::size_t>(queries) * 2);
        out = device_memory(static_cast<std::size_t>(queries) * 4);
        step.splits = full_kv_splits(step, processors());
        workspace = device_memory(full_kv_workspace(step) * 4);
        fill_uniform(keys.as<void>(), step.stored, elements, 1, stream);
        fill_uniform(values.as<void>(), step.stored, elements, 2, stream);
        fill_uniform(query.as<void>(), element::bf16, queries, 3, stream);
        step.keys = keys.as<void>(), step.values = values.as<void>(), step.queries = query.as<void>(), step.out = out.as<float>(), step.workspace = workspace.as<float>();
        step.scale = 1.0F / std::sqrt(static_cast<float>(full_kv_size));
    }
    [[nodiscard]] std::uint64_t bytes() const { return keys.bytes() + values.bytes(); }

    full_kv_step step;
    device_memory keys, values, query, out, workspace;
};

float of_fp8(std::uint8_t x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(1.0F + static_cast<float>(mantissa) / 8, exponent - 7);
    return x & 0x80 ? -size : size;
}

std::vector<float> fetch(const device_memory& m, element e, cudaStream_t s) {
    std::vector<std::uint8_t> bytes(m.bytes());
    cuda::check(cudaMemcpyAsync(bytes.data(), m.as<void>(), bytes.size(), cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    std::vector<float> floats;
    if (e == element::fp8) {
        for (const auto b : bytes) floats.push_back(of_fp8(b));
    } else {
        for (std::size_t i = 0; i < bytes.size(); i += 2) floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bytes[i] | bytes[i + 1] << 8) << 16));
    }
    return floats;
}

/// The largest difference from double precision over a small case: an opponent that computes something else proves nothing.
double error_of(element e, cudaStream_t s) {
    full_cache c({.stored = e, .batch = 2, .kv_heads = 2, .group = 3, .tokens = 333}, s);
    attend_full_kv(c.step, s);
    const auto k = fetch(c.keys, e, s), v = fetch(c.values, e, s), q = fetch(c.query, element::bf16, s);
    std::vector<float> out(c.out.bytes() / 4);
    cuda::check(cudaMemcpyAsync(out.data(), c.out.as<void>(), c.out.bytes(), cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    const auto d = static_cast<std::size_t>(full_kv_size), tokens = static_cast<std::size_t>(c.step.tokens), group = static_cast<std::size_t>(c.step.group);
    double worst = 0;
    for (std::size_t h = 0; h < out.size() / d; ++h) {
        std::vector<double> sum(d, 0.0);
        double weight = 0;
        for (std::size_t t = 0; t < tokens; ++t) {
            const std::size_t at = (h / group * tokens + t) * d;
            double logit = 0;
            for (std::size_t j = 0; j < d; ++j) logit += static_cast<double>(q[h * d + j]) * static_cast<double>(k[at + j]);
            const double p = std::exp(logit * static_cast<double>(c.step.scale));
            weight += p;
            for (std::size_t j = 0; j < d; ++j) sum[j] += p * static_cast<double>(v[at + j]);
        }
        for (std::size_t j = 0; j < d; ++j) {
            const double difference = std::abs(static_cast<double>(out[h * d + j]) - sum[j] / weight);
            worst = difference <= worst ? worst : difference;  // NaN is worse
        }
    }
    return worst;
}

void check_blas(cublasStatus_t status, const char* call) {
    if (status != CUBLAS_STATUS_SUCCESS) throw device_error(std::string(call) + " returned cuBLAS status " + std::to_string(static_cast<int>(status)) + ".", false);
}

/// Q K^T and P V of all heads as batched products, without the softmax between them.
double blas_products(const full_cache& c, const stopwatch& watch, int rounds) {
    const auto& s = c.step;
    const int n = static_cast<int>(s.tokens), heads = s.batch * s.kv_heads;
    device_memory logits(static_cast<std::size_t>(heads) * static_cast<std::size_t>(s.group) * static_cast<std::size_t>(n) * 2), out(c.query.bytes());
    fill_uniform(logits.as<void>(), element::bf16, static_cast<std::int64_t>(logits.bytes() / 2), 4, watch.stream());
    cublasHandle_t handle = nullptr;
    check_blas(cublasCreate(&handle), "cublasCreate");
    const float one = 1, zero = 0;
    double us = 0;
    try {
        check_blas(cublasSetStream(handle, watch.stream()), "cublasSetStream");
        us = watch.cold(rounds, [&] {
            check_blas(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, s.group, full_kv_size, &one, s.keys, CUDA_R_16BF, full_kv_size, static_cast<long long>(n) * full_kv_size, s.queries, CUDA_R_16BF,
                                                  full_kv_size, static_cast<long long>(s.group) * full_kv_size, &zero, logits.as<void>(), CUDA_R_16BF, n, static_cast<long long>(s.group) * n, heads,
                                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                       "cublasGemmStridedBatchedEx");
            check_blas(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, full_kv_size, s.group, n, &one, s.values, CUDA_R_16BF, full_kv_size, static_cast<long long>(n) * full_kv_size, logits.as<void>(),
                                                  CUDA_R_16BF, n, static_cast<long long>(s.group) * n, &zero, out.as<void>(), CUDA_R_16BF, full_kv_size, static_cast<long long>(s.group) * full_kv_size, heads,
                                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                       "cublasGemmStridedBatchedEx");
        });
    } catch (...) {
        (void)cublasDestroy(handle);
        throw;
    }
    (void)cublasDestroy(handle);
    return us;
}

const char* name_of(element e) { return e == element::bf16 ? "bf16" : "fp8"; }

}  // namespace

void measure_full_kv(const part_options& o) {
    const stopwatch watch(o.small);
    for (const auto e : {element::bf16, element::fp8}) {
        attempt({{"part", "full_kv_check"}, {"stored", name_of(e)}}, [&](json& row) {
            row["max_error"] = error_of(e, watch.stream());
            if (!(row["max_error"].get<double>() < 2e-2)) throw device_error("The full-KV opponent disagrees with double precision.", false);
        });
    }
    for (const auto tokens : o.tokens) {
        for (const auto batch : o.batches) {
            for (const auto e : {element::bf16, element::fp8}) {
                attempt({{"part", "full_kv"}, {"stored", name_of(e)}, {"tokens", tokens}, {"batch", batch}}, [&](json& row) {
                    const full_cache c({.stored = e, .batch = batch, .tokens = tokens}, watch.stream());
                    row["bytes"] = c.bytes(), row["splits"] = c.step.splits;
                    row["us"] = watch.cold(o.rounds, [&] { attend_full_kv(c.step, watch.stream()); });
                    if (e == element::bf16 && !o.small) row["cublas_products_us"] = blas_products(c, watch, std::min(o.rounds, 5));
                });
            }
        }
    }
}

}  // namespace sekv::bench
