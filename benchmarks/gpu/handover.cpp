// handover.cpp: what one exchange of a split layer takes: a graph of layers that post and merge, and threads
// that answer with what was posted; beside it the same launches without waiting. By how the threads share the
// work. g++ -O3 -std=c++20 -pthread -Iruntime/native -Iruntime/native/include benchmarks/gpu/handover.cpp
// runtime/native/src/pool.cpp runtime/native/src/status.cpp -o handover
// ./handover build/gpu/runtime/native/libpi_cuda.so [THREADS [RUNS]]
#include "cuda/pi_gpu.h"
#include "src/gpu/packets.h"
#include "src/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t n_layers = 40;
constexpr uint64_t limit_ns = 5'000'000'000;
constexpr uint32_t part_packets = 8; // as the engine has it

// How threads come to have all of x before they give a slice of the answer each.
enum class Sharing {
    one,    // one thread takes all and gives all
    slices, // none has: every thread answers with the slice that it took: what the bus and the packets take
    pool,  // when a packet is there, a job of the pool: a slice each into one array, which the next job reads
    ahead, // the same, but the first job waits for the packets
    barrier, // one job ahead: a slice each into one array, a barrier, all of the array
    each,    // one job ahead: every thread takes all packets, its own slice first
    in_order // one job ahead: every thread takes all packets, the first one first
};

struct Variant {
    const char *name;
    Sharing sharing;
};

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
    const Device &on;
    T *host, *device;

    Pinned(const Device &with, uint64_t n) : on(with) {
        void *both[2];
        on.check(on.api->allocate_host(on.gpu, n * sizeof(T), &both[0], &both[1]));
        host = static_cast<T *>(both[0]);
        device = static_cast<T *>(both[1]);
        std::memset(both[0], 0, n * sizeof(T));
    }
    Pinned(const Pinned &) = delete;
    ~Pinned() { on.api->release_host(on.gpu, host); }
};

// Between two looks at what another side writes.
class Spin {
  public:
    bool operator()() const {
        if (n_++ == 0)
            begin_ = Clock::now();
        if (n_ % 65536 == 0 && Clock::now() - begin_ > std::chrono::seconds(8)) {
            std::fprintf(stderr, "handover: a thread waited for 8 s\n");
            std::_Exit(1);
        }
        pi::cpu_pause();
        return true;
    }

  private:
    mutable uint32_t n_ = 0;
    mutable Clock::time_point begin_;
};

class Exchange {
  public:
    Exchange(const Device &device, uint32_t n_embd, uint32_t n_runs, uint32_t n_threads,
             const Variant &variant)
        : device_(device), variant_(variant), n_embd_(n_embd), n_runs_(n_runs),
          n_threads_(variant.sharing == Sharing::one ? 1 : n_threads),
          n_packets_(pi::packets_for_elements(n_embd)), late_(device, 16), posted_(device, n_packets_),
          answer_(device, n_packets_), shared_(n_embd), step_(device.allocate<uint32_t>(2)),
          x_(device.allocate<float>(n_embd)), y_(device.allocate<float>(n_embd)),
          pool_(has_pool(variant) ? n_threads : 1) {
        pool_.stay_awake(true);
        for (uint32_t i = 0; i < n_embd; ++i)
            inputs_.push_back(static_cast<float>(i % 1021) / 64 - 3);
        device.check(device.api->upload(device.gpu, inputs_.data(), n_embd * sizeof(float), x_));
        const uint32_t n_parts = (n_packets_ + part_packets - 1) / part_packets;
        for (uint32_t thread = 0; thread <= n_threads_; ++thread)
            starts_.push_back(
                std::min(n_embd, n_parts * thread / n_threads_ * part_packets * PI_GPU_PACKET_ELEMENTS));
    }
    ~Exchange() {
        for (void *data : {static_cast<void *>(step_), static_cast<void *>(x_), static_cast<void *>(y_)})
            device_.api->release(device_.gpu, data);
    }

    // Microseconds of a layer.
    void measure(bool answered, double &median, double &best) {
        device_.check(device_.api->begin_capture(device_.gpu));
        for (uint32_t order = 1; order <= n_layers; ++order)
            queue(order, answered);
        pi_gpu_graph *graph = nullptr;
        device_.check(device_.api->end_capture(device_.gpu, &graph));
        std::vector<std::thread> threads;
        const bool alone = answered && variant_.sharing == Sharing::slices;
        for (uint32_t thread = 1; alone && thread < n_threads_; ++thread)
            threads.emplace_back([this, thread, from = base_] {
                for (uint32_t i = 1; i <= n_runs_ * n_layers; ++i)
                    answer_slice(thread, from + n_layers + i);
            });
        first_value_ = base_ + n_layers;
        std::vector<double> times;
        for (uint32_t run = 0; run < n_runs_; ++run)
            times.push_back(once(graph, answered));
        for (std::thread &thread : threads)
            thread.join();
        device_.check(device_.api->release_graph(device_.gpu, graph));
        std::sort(times.begin(), times.end());
        median = times[times.size() / 2];
        best = times.front();
    }

  private:
    static bool has_pool(const Variant &variant) {
        return variant.sharing != Sharing::one && variant.sharing != Sharing::slices;
    }

    void queue(uint32_t order, bool answered) const {
        pi_gpu_post_x post{};
        post.post = {step_, order, n_packets_, posted_.device, nullptr};
        post.n_tokens = 1;
        post.n_embd = n_embd_;
        post.x = y_;
        device_.check(device_.api->post(device_.gpu, &post));
        pi_gpu_merge merge{};
        merge.base = step_;
        merge.order = order;
        merge.n_tokens = 1;
        merge.n_embd = n_embd_;
        merge.abandoned = late_.device + 8;
        merge.late = late_.device;
        merge.given_up = step_ + 1;
        merge.limit_ns = limit_ns;
        merge.share[0] = x_;
        merge.answer = answered ? answer_.device : nullptr;
        merge.answer_stride = n_packets_;
        merge.y = y_;
        device_.check(device_.api->merge(device_.gpu, &merge));
    }

    double once(pi_gpu_graph *graph, bool answered) {
        base_ += n_layers;
        const uint32_t words[] = {base_, 0};
        device_.check(device_.api->upload(device_.gpu, words, sizeof words, step_));
        device_.check(device_.api->zero(device_.gpu, y_, n_embd_ * sizeof(float)));
        device_.check(device_.api->synchronize(device_.gpu));
        const auto begin = Clock::now();
        device_.check(device_.api->launch_graph(device_.gpu, graph));
        for (uint32_t order = 1; answered && order <= n_layers; ++order)
            answer(base_ + order);
        device_.check(device_.api->synchronize(device_.gpu));
        const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
        if (answered)
            require_sums();
        return took.count() / n_layers;
    }

    // Every exchange shows in the sums: each layer adds its input and what was posted, that is, doubles.
    // Relative to the largest of a packet an exchange adds half the 2^-14 that packets may be off.
    void require_sums() const {
        std::vector<float> y(n_embd_);
        device_.check(device_.api->download(device_.gpu, y_, n_embd_ * sizeof(float), y.data()));
        device_.check(device_.api->synchronize(device_.gpu));
        const double doubled = std::ldexp(1.0, n_layers) - 1;
        for (uint32_t i = 0; i < n_embd_; ++i) {
            const double want = inputs_[i] * doubled;
            const uint32_t first = i / PI_GPU_PACKET_ELEMENTS * PI_GPU_PACKET_ELEMENTS;
            double largest = 0;
            for (uint32_t k = first; k < std::min(n_embd_, first + PI_GPU_PACKET_ELEMENTS); ++k)
                largest = std::max(largest, std::abs(inputs_[k] * doubled));
            if (!(std::abs(y[i] - want) <= n_layers * std::ldexp(largest, -14)))
                throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(y[i]) +
                                         " instead of " + std::to_string(want));
        }
    }

    // The thread's slice of an exchange, once it is there.
    void take(uint32_t thread, uint32_t value, float *to) const {
        const uint32_t begin = starts_[thread];
        pi::take_elements(posted_.host + begin / PI_GPU_PACKET_ELEMENTS, starts_[thread + 1] - begin, value,
                          to + begin, Spin());
    }
    void give(uint32_t thread, uint32_t value, const float *from) const {
        const uint32_t begin = starts_[thread];
        pi::give_elements(from + begin, starts_[thread + 1] - begin, value,
                          answer_.host + begin / PI_GPU_PACKET_ELEMENTS);
    }

    void answer_slice(uint32_t thread, uint32_t value) const {
        static thread_local std::vector<float> own;
        own.resize(n_embd_);
        take(thread, value, own.data());
        give(thread, value, own.data());
    }

    // What a thread does with its input before it has a result: it reads all of it.
    void read_all(const float *x) const {
        float sum = 0;
        for (uint32_t i = 0; i < n_embd_; i += 16)
            sum += x[i];
        asm volatile("" : : "m"(sum));
    }

    // All packets into the thread's own array, beginning with those of slice `first`.
    const float *take_all(uint32_t first, uint32_t value) const {
        static thread_local std::vector<float> own;
        own.resize(n_embd_);
        for (uint32_t i = 0; i < n_threads_; ++i)
            take((first + i) % n_threads_, value, own.data());
        return own.data();
    }

    void meet(uint32_t value) {
        arrived_.fetch_add(1, std::memory_order_acq_rel);
        const Spin spin;
        while (arrived_.load(std::memory_order_acquire) < (value - first_value_) * n_threads_)
            spin();
    }

    void answer_in_two_jobs(uint32_t value) {
        pi::WholePacket first;
        if (variant_.sharing == Sharing::pool)
            pi::await_packet(posted_.host, value, Spin(), first);
        pool_.run(n_threads_, [&](int64_t, uint32_t thread) { take(thread, value, shared_.data()); });
        pool_.run(n_threads_, [&](int64_t, uint32_t thread) {
            read_all(shared_.data());
            give(thread, value, shared_.data());
        });
    }

    void answer_in_one_job(uint32_t value) {
        pool_.run(n_threads_, [&](int64_t, uint32_t thread) {
            if (variant_.sharing != Sharing::barrier)
                return give(thread, value, take_all(variant_.sharing == Sharing::each ? thread : 0, value));
            take(thread, value, shared_.data());
            meet(value);
            read_all(shared_.data());
            give(thread, value, shared_.data());
        });
    }

    void answer(uint32_t value) {
        if (variant_.sharing == Sharing::one || variant_.sharing == Sharing::slices)
            return answer_slice(0, value);
        if (variant_.sharing == Sharing::pool || variant_.sharing == Sharing::ahead)
            return answer_in_two_jobs(value);
        answer_in_one_job(value);
    }

    const Device &device_;
    const Variant variant_;
    const uint32_t n_embd_, n_runs_, n_threads_, n_packets_;
    Pinned<uint32_t> late_;
    Pinned<pi_gpu_packet> posted_, answer_;
    std::vector<float> shared_;
    std::vector<uint32_t> starts_; // [n_threads + 1] elements
    std::vector<float> inputs_;
    uint32_t *step_;
    float *x_, *y_;
    uint32_t base_ = 0;
    uint32_t first_value_ = 0; // exchanges of before the threads had a part in them
    alignas(64) std::atomic<uint32_t> arrived_{0};
    pi::Pool pool_;

  public:
    // Launches alone, then exchanges; microseconds.
    void print() {
        double alone = 0, with = 0, least_alone = 0, least = 0;
        measure(false, alone, least_alone);
        measure(true, with, least);
        std::printf(
            "E %5u %-10s %2u threads: launches %6.2f, exchange %6.2f (best %6.2f), over them %6.2f us "
            "(best %6.2f)\n",
            n_embd_, variant_.name, n_threads_, alone, with, least, with - alone, least - least_alone);
    }
};

constexpr Variant variants[] = {
    {"one thread", Sharing::one},    {"slices", Sharing::slices},   {"pool", Sharing::pool},
    {"ahead", Sharing::ahead},       {"barrier", Sharing::barrier}, {"each", Sharing::each},
    {"in order", Sharing::in_order},
};

void run(const char *path, uint32_t n_threads, uint32_t n_runs) {
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
        for (const Variant &variant : variants)
            Exchange(device, n_embd, n_runs, n_threads, variant).print();
    }
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc < 2 || argc > 4)
            throw std::runtime_error("usage: handover LIBPI_CUDA.so [THREADS [RUNS]]");
        const uint32_t cores = std::thread::hardware_concurrency();
        const auto number = [&](int i, uint32_t fallback) {
            return argc > i ? static_cast<uint32_t>(std::stoul(argv[i])) : fallback;
        };
        run(argv[1], number(2, cores > 1 ? cores - 1 : 1), number(3, 100));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "handover: %s\n", error.what());
        std::_Exit(1); // threads may still wait
    }
    return 0;
}
