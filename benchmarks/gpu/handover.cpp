// handover.cpp: what one exchange of a split layer takes: a graph of layers that post and merge, and threads
// that answer with what was posted; beside it the same launches without waiting. By what an element is, by
// how the threads share the work, and by how the answer's memory is cached. g++ -O2 -std=c++20 -pthread
// -Iruntime/native -Iruntime/native/include benchmarks/gpu/handover.cpp -o handover
// ./handover build/gpu/runtime/native/libpi_cuda.so [THREADS [RUNS]]
#include "cuda/pi_gpu.h"
#include "src/gpu/packets.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <emmintrin.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t n_layers = 40;
constexpr uint64_t limit_ns = 5'000'000'000;
constexpr uint32_t packets_of_line = 4;

// How the threads take what was posted. They write a slice of the answer each.
enum class Taking {
    slices, // a slice each: what the bus and the packets take
    all,    // all of it each, from the packets: what every thread multiplies with
    shared, // a slice each into an array of all, and then all of that each
    first   // the first thread everything into that array, and then all of that each
};

struct Variant {
    const char *name;
    bool halves, combined;
    Taking taking;
    bool many; // threads
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

    Pinned(const Device &with, uint64_t n, bool combined = false) : on(with) {
        void *both[2];
        on.check(on.api->allocate_host(on.gpu, n * sizeof(T), combined ? 1 : 0, &both[0], &both[1]));
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
        _mm_pause();
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
          n_threads_(variant.many ? n_threads : 1),
          n_packets_(static_cast<uint32_t>(pi::packets_for(variant.halves ? n_embd / 2 : n_embd))),
          late_(device, 16), posted_(device, n_packets_), answer_(device, n_packets_, variant.combined),
          shared_(pi::packet_words * n_packets_), step_(device.allocate<uint32_t>(2)),
          x_(device.allocate<float>(n_embd)), y_(device.allocate<float>(n_embd)) {
        for (uint32_t i = 0; i < n_embd; ++i)
            inputs_.push_back(static_cast<float>(i % 1021) / 64 - 3);
        device.check(device.api->upload(device.gpu, inputs_.data(), n_embd * sizeof(float), x_));
        const uint32_t lines = (n_packets_ + packets_of_line - 1) / packets_of_line;
        for (uint32_t thread = 0; thread <= n_threads_; ++thread)
            starts_.push_back(std::min(n_packets_, lines * thread / n_threads_ * packets_of_line));
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
        for (uint32_t thread = 1; answered && thread < n_threads_; ++thread)
            threads.emplace_back([this, thread, from = base_] {
                for (uint32_t i = 1; i <= n_runs_ * n_layers; ++i)
                    take_and_answer(thread, from + n_layers + i);
            });
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
    void queue(uint32_t order, bool answered) const {
        pi_gpu_post post{};
        post.base = step_;
        post.order = order;
        post.n_tokens = 1;
        post.n_embd = n_embd_;
        post.halves = variant_.halves;
        post.x = variant_.halves ? x_ : y_; // y grows beyond float16
        post.out = posted_.device;
        post.out_stride = n_packets_;
        device_.check(device_.api->post(device_.gpu, &post));
        pi_gpu_merge merge{};
        merge.base = step_;
        merge.order = order;
        merge.n_tokens = 1;
        merge.n_embd = n_embd_;
        merge.halves = variant_.halves;
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
            take_and_answer(0, base_ + order);
        device_.check(device_.api->synchronize(device_.gpu));
        const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
        if (answered)
            require_sums();
        return took.count() / n_layers;
    }

    // Every exchange shows in the sums: each layer adds its input and what was posted.
    void require_sums() const {
        std::vector<float> y(n_embd_);
        device_.check(device_.api->download(device_.gpu, y_, n_embd_ * sizeof(float), y.data()));
        device_.check(device_.api->synchronize(device_.gpu));
        for (uint32_t i = 0; i < n_embd_; ++i) {
            float want = 0;
            for (uint32_t layer = 0; layer < n_layers; ++layer)
                want = want + (inputs_[i] + (variant_.halves ? inputs_[i] : want));
            const bool same =
                variant_.halves ? std::abs(y[i] - want) <= 0.002f * std::abs(want) : y[i] == want;
            if (!same)
                throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(y[i]) +
                                         " instead of " + std::to_string(want));
        }
    }

    // Packets [begin, end) of an exchange, once they are there.
    void take(uint32_t begin, uint32_t end, uint32_t value, uint32_t *words) const {
        pi::take_packets(posted_.host + begin, pi::packet_words * (end - begin), value,
                         words + pi::packet_words * begin, Spin());
    }

    void give(uint32_t begin, uint32_t end, uint32_t value, const uint32_t *words) const {
        if (!variant_.combined)
            return pi::give_packets(words + pi::packet_words * begin, pi::packet_words * (end - begin), value,
                                    answer_.host + begin);
        for (uint32_t i = begin; i < end; ++i) {
            const uint32_t *from = words + pi::packet_words * i;
            const pi::WholePacket packet = {from[0], from[1], from[2], value};
            _mm_stream_si128(reinterpret_cast<__m128i *>(answer_.host + i), (__m128i)packet);
        }
        _mm_sfence();
    }

    // What a thread does with its input before it has a result: reads all of it.
    static void read(const std::vector<uint32_t> &words) {
        uint32_t sum = 0;
        for (const uint32_t word : words)
            sum += word;
        asm volatile("" : : "r"(sum));
    }

    void take_and_answer(uint32_t thread, uint32_t value) {
        static thread_local std::vector<uint32_t> own;
        own.resize(pi::packet_words * n_packets_);
        const uint32_t begin = starts_[thread], end = starts_[thread + 1];
        if (variant_.taking == Taking::slices) {
            take(begin, end, value, own.data());
            return give(begin, end, value, own.data());
        }
        if (variant_.taking == Taking::all) {
            take(0, n_packets_, value, own.data());
            read(own);
            return give(begin, end, value, own.data());
        }
        const bool first = variant_.taking == Taking::first;
        if (thread == 0)
            take(0, first ? n_packets_ : 1, value, shared_.data());
        pass(thread, value, started_);
        if (!first) {
            take(begin, end, value, shared_.data());
            meet(value);
        }
        read(shared_);
        give(begin, end, value, shared_.data());
    }

    // The first thread has work for the others, as a pool has it.
    void pass(uint32_t thread, uint32_t value, std::atomic<uint32_t> &at) const {
        if (thread == 0)
            return at.store(value, std::memory_order_release);
        for (Spin spin; static_cast<int32_t>(at.load(std::memory_order_acquire) - value) < 0;)
            spin();
    }

    // All threads have come here.
    void meet(uint32_t value) {
        const uint32_t last = (value - n_before_) * n_threads_;
        met_.fetch_add(1, std::memory_order_acq_rel);
        for (Spin spin; static_cast<int32_t>(met_.load(std::memory_order_acquire) - last) < 0;)
            spin();
    }

    const Device &device_;
    const Variant variant_;
    const uint32_t n_embd_, n_runs_, n_threads_, n_packets_;
    Pinned<uint32_t> late_;
    Pinned<pi_gpu_packet> posted_, answer_;
    std::vector<uint32_t> shared_;
    std::vector<uint32_t> starts_; // [n_threads + 1] packets
    std::vector<float> inputs_;
    uint32_t *step_;
    float *x_, *y_;
    uint32_t base_ = 0;
    uint32_t n_before_ = 0; // exchanges that were not answered
    alignas(64) std::atomic<uint32_t> started_{0};
    alignas(64) std::atomic<uint32_t> met_{0};

  public:
    // Launches alone, then exchanges; microseconds.
    void print() {
        double alone = 0, with = 0, least_alone = 0, least = 0;
        measure(false, alone, least_alone);
        n_before_ = base_ + n_layers;
        measure(true, with, least);
        std::printf(
            "E %5u %-34s %2u threads: launches %6.2f, exchange %6.2f (best %6.2f), over them %6.2f us "
            "(best %6.2f)\n",
            n_embd_, variant_.name, n_threads_, alone, with, least, with - alone, least - least_alone);
    }
};

constexpr Variant variants[] = {
    {"float32, one thread", false, false, Taking::slices, false},
    {"float32, slices", false, false, Taking::slices, true},
    {"float32, slices, write-combined", false, true, Taking::slices, true},
    {"float32, all packets each", false, false, Taking::all, true},
    {"float32, slices to shared", false, false, Taking::shared, true},
    {"float32, first thread to shared", false, false, Taking::first, true},
    {"float16, one thread", true, false, Taking::slices, false},
    {"float16, slices", true, false, Taking::slices, true},
    {"float16, slices, write-combined", true, true, Taking::slices, true},
    {"float16, all packets each", true, false, Taking::all, true},
    {"float16, slices to shared", true, false, Taking::shared, true},
    {"float16, first thread to shared", true, false, Taking::first, true},
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
    for (const uint32_t n_embd : {128u, 4096u, 5120u, 8192u}) {
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
