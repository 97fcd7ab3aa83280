// handover.cpp: what one exchange of a split layer takes: a graph of layers that post and merge, a thread
// that answers at once; beside it the same launches without waiting. By the number of blocks that post. g++
// -O2 -std=c++20 -Iruntime/native -Iruntime/native/include benchmarks/gpu/handover.cpp -o handover
// ./handover build/gpu/runtime/native/libpi_cuda.so
#include "cuda/pi_gpu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr uint32_t n_layers = 40, most_blocks = 16;
constexpr uint64_t limit_ns = 5'000'000'000;

struct Device {
    const pi_gpu_api *api;
    pi_gpu *gpu = nullptr;

    void check(int32_t status) const {
        if (status != 0)
            throw std::runtime_error(api->error());
    }
    template <typename T>
    T *allocate(uint64_t n) const {
        void *data = nullptr;
        check(api->allocate(gpu, n * sizeof(T), &data));
        check(api->zero(gpu, data, n * sizeof(T)));
        return static_cast<T *>(data);
    }
};

template <typename T>
struct Pinned {
    T *host, *device;

    Pinned(const Device &on, uint64_t n) {
        void *both[2];
        on.check(on.api->allocate_host(on.gpu, n * sizeof(T), &both[0], &both[1]));
        host = static_cast<T *>(both[0]);
        device = static_cast<T *>(both[1]);
        std::memset(both[0], 0, n * sizeof(T));
    }
};

class Exchange {
  public:
    Exchange(const Device &device, uint32_t n_embd, uint32_t n_runs)
        : device_(device), n_embd_(n_embd), n_runs_(n_runs), flags_(device, most_blocks * PI_GPU_FLAG_STRIDE),
          mail_(device, 8), late_(device, 8), posted_(device, n_embd), answer_(device, n_embd),
          step_(device.allocate<uint32_t>(2)), x_(device.allocate<float>(n_embd)),
          y_(device.allocate<float>(n_embd)) {}

    // Microseconds of a layer, median and best.
    void measure(uint32_t n_blocks, bool answered, double &median, double &best) {
        device_.check(device_.api->begin_capture(device_.gpu));
        for (uint32_t order = 1; order <= n_layers; ++order)
            queue(order, n_blocks, answered);
        pi_gpu_graph *graph = nullptr;
        device_.check(device_.api->end_capture(device_.gpu, &graph));
        std::vector<double> times;
        for (uint32_t run = 0; run < n_runs_; ++run)
            times.push_back(once(graph, n_blocks, answered));
        device_.check(device_.api->release_graph(device_.gpu, graph));
        std::sort(times.begin(), times.end());
        median = times[times.size() / 2];
        best = times.front();
    }

  private:
    void queue(uint32_t order, uint32_t n_blocks, bool answered) const {
        pi_gpu_post post{};
        post.base = step_;
        post.order = order;
        post.n_tokens = 1;
        post.n_embd = n_embd_;
        post.n_blocks = n_blocks;
        post.x = x_;
        post.x_out = posted_.device;
        post.flags = flags_.device;
        device_.check(device_.api->post(device_.gpu, &post));
        pi_gpu_merge merge{};
        merge.base = step_;
        merge.order = order;
        merge.mail = mail_.device;
        merge.late = late_.device;
        merge.given_up = step_ + 1;
        merge.limit_ns = limit_ns;
        merge.share[0] = x_;
        merge.answer = answered ? answer_.device : nullptr;
        merge.n = n_embd_;
        merge.y = y_;
        device_.check(device_.api->merge(device_.gpu, &merge));
    }

    double once(pi_gpu_graph *graph, uint32_t n_blocks, bool answered) {
        base_ += n_layers;
        const uint32_t words[] = {base_, 0};
        device_.check(device_.api->upload(device_.gpu, words, sizeof words, step_));
        device_.check(device_.api->synchronize(device_.gpu));
        const auto begin = std::chrono::steady_clock::now();
        device_.check(device_.api->launch_graph(device_.gpu, graph));
        for (uint32_t order = 1; answered && order <= n_layers; ++order) {
            for (uint32_t block = 0; block < n_blocks; ++block) {
                std::atomic_ref flag(flags_.host[block * PI_GPU_FLAG_STRIDE]);
                while (flag.load(std::memory_order_acquire) != base_ + order) {
                }
            }
            std::memcpy(answer_.host, posted_.host, n_embd_ * sizeof(float)); // as if it had been computed
            std::atomic_ref(*mail_.host).store(base_ + order, std::memory_order_release);
        }
        device_.check(device_.api->synchronize(device_.gpu));
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        return took.count() / n_layers;
    }

    const Device &device_;
    uint32_t n_embd_, n_runs_;
    Pinned<uint32_t> flags_;
    Pinned<uint64_t> mail_;
    Pinned<uint32_t> late_;
    Pinned<float> posted_, answer_;
    uint32_t *step_;
    float *x_, *y_;
    uint32_t base_ = 0;
};

void run(const char *path, uint32_t n_runs) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw std::runtime_error(dlerror());
    const auto get = reinterpret_cast<pi_gpu_api_get_fn>(dlsym(library, PI_GPU_ENTRY));
    Device device{get(PI_GPU_ABI)};
    if (device.api == nullptr)
        throw std::runtime_error("the library has another interface");
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    device.check(device.api->open(0, 0, &device.gpu));
    device.check(device.api->reserve(device.gpu, 0, 0, 0, 64u << 20)); // room for graphs
    for (const uint32_t n_embd : {4096u, 5120u, 8192u}) {
        Exchange exchange(device, n_embd, n_runs);
        for (const uint32_t n_blocks : {1u, 2u, 3u, 4u, 8u}) {
            double alone = 0, with = 0, least_alone = 0, least = 0;
            exchange.measure(n_blocks, false, alone, least_alone);
            exchange.measure(n_blocks, true, with, least);
            std::printf(
                "E %5u, %2u blocks: launches %6.2f us, exchange %6.2f us (best %.2f), over them %6.2f us\n",
                n_embd, n_blocks, alone, with, least, with - alone);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc < 2 || argc > 3)
            throw std::runtime_error("usage: handover LIBPI_CUDA.so [RUNS]");
        run(argv[1], argc == 3 ? static_cast<uint32_t>(std::stoul(argv[2])) : 200);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "handover: %s\n", error.what());
        return 1;
    }
    return 0;
}
