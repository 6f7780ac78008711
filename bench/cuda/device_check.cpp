// What scripts/device_check runs: one part, one JSON line per result. Exits 2 where there is no device.
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include "bench/cuda/device.hpp"

namespace {

using namespace sekv::bench;

template <class T>
std::vector<T> numbers(const char* text) {
    std::vector<T> all;
    std::stringstream s(text);
    for (std::string x; std::getline(s, x, ',');) all.push_back(static_cast<T>(std::stoll(x)));
    return all;
}

void describe() {
    cudaDeviceProp p{};
    int runtime = 0, driver = 0;
    sekv::cuda::check(cudaGetDeviceProperties(&p, 0), "cudaGetDeviceProperties");
    sekv::cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    sekv::cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    emit({{"part", "device"}, {"name", p.name}, {"capability", 10 * p.major + p.minor}, {"multiprocessors", p.multiProcessorCount}, {"l2_bytes", p.l2CacheSize}, {"memory_bytes", p.totalGlobalMem},
          {"runtime", runtime}, {"driver", driver}});
}

}  // namespace

int main(int argc, char** argv) {
    part_options o;
    std::vector<std::string> parts;
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        const bool more = i + 1 < argc;
        if (a == "--small") o.small = true, o.tokens = {3000}, o.batches = {2}, o.rounds = 1;
        else if (a == "--tokens" && more) o.tokens = numbers<std::int64_t>(argv[++i]);
        else if (a == "--batch" && more) o.batches = numbers<std::int32_t>(argv[++i]);
        else if (a == "--rounds" && more) o.rounds = std::atoi(argv[++i]);
        else parts.push_back(a);
    }
    const std::map<std::string, void (*)(const part_options&)> known = {{"full_kv", measure_full_kv}, {"decode", measure_decode}, {"zoom", measure_zoom}, {"pcie", measure_pcie}};
    for (const auto& p : parts) {
        if (known.contains(p) || p == "device") continue;
        std::fprintf(stderr, "usage: sekv_device_check [--small] [--tokens N,...] [--batch N,...] [--rounds N] [device | full_kv | decode | zoom | pcie] ...\n");
        return 64;
    }
    int devices = 0;
    if (const auto result = cudaGetDeviceCount(&devices); result != cudaSuccess || devices == 0) {
        std::fprintf(stderr, "sekv_device_check: no CUDA device (%s)\n", cudaGetErrorString(result));
        return 2;
    }
    int status = 0;
    for (const auto& p : parts) {
        try {
            if (p == "device") describe();
            else known.at(p)(o);
        } catch (const std::exception& e) {
            emit({{"part", p}, {"error", e.what()}});
            status = 1;
        }
    }
    return status;
}
