// emulator.cpp: fibers, the queue and the runtime's calls.
#include "emulator.h"

#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <immintrin.h>
#include <memory>
#include <mutex>
#include <thread>
#include <ucontext.h>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

using Work = std::vector<std::function<void()>>;

// Work in the order in which it was recorded; arguments are copies, as a device's graph has them.
struct emulated_graph {
    std::shared_ptr<const Work> work;
};

namespace emulator {
namespace {

constexpr size_t stack_bytes = 64 << 10;
constexpr size_t shared_bytes = 100 << 10;
constexpr size_t exchange_bytes = 32; // of a lane

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack = std::vector<char>(stack_bytes);
    bool started = false, done = false;
    uint64_t barriers = 0;  // that it has reached
    uint64_t exchanges = 0; // of its warp
};

std::vector<Fiber> fibers;
jmp_buf scheduler;
size_t current;
uint32_t n_threads;
const std::function<void()> *body;
enum class Capture { none, recording, invalid };
Capture capture = Capture::none; // of the program's thread
Work recorded;
alignas(16) uint8_t shared[shared_bytes];
// [warp][parity]: values of the last two exchanges
std::vector<uint8_t> slots;

uint8_t *slot(size_t warp, uint64_t exchange) {
    return slots.data() + (warp * 2 + exchange % 2) * 32 * exchange_bytes;
}

[[noreturn]] void entry() {
    (*body)();
    fibers[current].done = true;
    _longjmp(scheduler, 1);
}

void resume(size_t i) {
    current = i;
    threadIdx = dim3(static_cast<uint32_t>(i), 0, 0);
    Fiber &fiber = fibers[i];
    if (_setjmp(scheduler) != 0)
        return;
    if (fiber.started)
        _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = stack_bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, entry, 0);
    setcontext(&fiber.start);
}

void pause() {
    if (_setjmp(fibers[current].at) == 0)
        _longjmp(scheduler, 1);
}

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
}

// Whether every thread of [begin, end) has got as far; threads that ended count as having.
template <typename Count>
bool all_reached(size_t begin, size_t end, uint64_t n, Count count) {
    for (size_t i = begin; i < end; ++i) {
        if (!fibers[i].done && count(fibers[i]) < n)
            return false;
    }
    return true;
}

// Every other block runs its threads backwards: what lacks a barrier comes out wrong one way or the other.
void run_block() {
    static bool backwards = false;
    backwards = !backwards;
    for (uint32_t i = 0; i < n_threads; ++i) {
        fibers[i].started = fibers[i].done = false;
        fibers[i].barriers = fibers[i].exchanges = 0;
    }
    for (bool busy = true; busy;) {
        busy = false;
        for (size_t n = 0; n < n_threads; ++n) {
            const size_t i = backwards ? n_threads - 1 - n : n;
            if (fibers[i].done)
                continue;
            busy = true;
            resume(i);
        }
    }
}

} // namespace

void *dynamic_shared() {
    return shared;
}

void barrier() {
    const uint64_t n = ++fibers[current].barriers;
    while (!all_reached(0, n_threads, n, [](const Fiber &f) { return f.barriers; }))
        pause();
}

const uint8_t *exchange(const void *value, size_t n_bytes) {
    if (n_bytes > exchange_bytes)
        fail("a value is too large to exchange");
    const size_t warp = current / 32, lane = current % 32;
    const uint64_t n = ++fibers[current].exchanges;
    uint8_t *values = slot(warp, n);
    std::memcpy(values + lane * n_bytes, value, n_bytes);
    while (!all_reached(warp * 32, std::min<size_t>(warp * 32 + 32, n_threads), n,
                        [](const Fiber &f) { return f.exchanges; }))
        pause();
    return values;
}

namespace {

// A thread of its own does the queued work, while the program does something else: but none before the
// program flushes the queue, as late as a device may begin.
class Queue {
  public:
    void add(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(work));
        ++added_;
    }
    void flush() {
        const std::lock_guard lock(mutex_);
        if (!running_) {
            running_ = true;
            std::thread([this] { run(); }).detach();
        }
        released_ = added_;
        changed_.notify_all();
    }
    void wait() {
        flush();
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&, last = added_] { return done_ >= last; });
    }
    bool idle() {
        const std::lock_guard lock(mutex_);
        return done_ == added_;
    }
    void stall(bool on) {
        const std::lock_guard lock(mutex_);
        stalled_ = on;
        changed_.notify_all();
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return done_ < released_ && !stalled_; });
            const std::function<void()> work = std::move(work_.front());
            work_.pop_front();
            lock.unlock();
            work();
            lock.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    uint64_t added_ = 0, released_ = 0, done_ = 0;
    bool running_ = false, stalled_ = false;
};

Queue &the_queue() {
    static Queue &queue = *new Queue; // its thread may outlive main
    return queue;
}

} // namespace

void queue(std::function<void()> work) {
    if (capture == Capture::none)
        the_queue().add(std::move(work));
    else
        recorded.push_back(std::move(work));
}

void flush_queue() {
    the_queue().flush();
}

// A wait for the device ends a capture, as it does on one.
bool may_wait() {
    if (capture != Capture::none)
        capture = Capture::invalid;
    return capture == Capture::none;
}

void run_queue() {
    the_queue().wait();
}

void run_blocks(dim3 grid, dim3 block, const std::function<void()> &thread) {
    n_threads = block.x;
    if (block.y != 1 || block.z != 1 || n_threads % 32 != 0 || n_threads > 1024)
        fail("a block of an unexpected shape");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
        fail("a grid that no device takes");
    if (fibers.size() < n_threads)
        fibers.resize(n_threads);
    slots.resize(size_t{n_threads} / 32 * 2 * 32 * exchange_bytes);
    body = &thread;
    gridDim = grid;
    blockDim = block;
    for (uint32_t z = 0; z < grid.z; ++z) {
        for (uint32_t y = 0; y < grid.y; ++y) {
            for (uint32_t x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                std::memset(shared, 0xff, sizeof shared); // NaN: what is not written must not be read
                run_block();
            }
        }
    }
}

float from_half(uint16_t bits) {
    return _cvtsh_ss(bits);
}

uint16_t to_half(float x) {
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

} // namespace emulator

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorNotReady:
        return "not ready";
    default:
        return "operation not permitted when stream is capturing";
    }
}
cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int) {
    *out = {"emulated device", 4, 9, 0};
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *, int, int) {
    return cudaErrorMemoryAllocation;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = size_t{4} << 30;
    return cudaSuccess;
}
cudaError_t cudaFree(void *) {
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **out, size_t n_bytes) {
    *out = std::malloc(n_bytes);
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t n_bytes, unsigned) {
    return cudaMallocHost(out, n_bytes);
}
cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned) {
    *out = host;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *data) {
    std::free(data);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, cudaMemcpyKind, cudaStream_t) {
    emulator::queue([=] { std::memcpy(to, from, n_bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *data, int value, size_t n_bytes, cudaStream_t) {
    emulator::queue([=] { std::memset(data, value, n_bytes); });
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) {
    *out = reinterpret_cast<cudaStream_t>(1);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    if (!emulator::may_wait())
        return cudaErrorStreamCaptureUnsupported;
    emulator::run_queue();
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
    emulator::flush_queue();
    return emulator::the_queue().idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) {
    *out = reinterpret_cast<cudaEvent_t>(1);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    if (!emulator::may_wait())
        return cudaErrorStreamCaptureUnsupported;
    emulator::run_queue();
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (emulator::capture != emulator::Capture::none)
        return cudaErrorStreamCaptureUnsupported;
    emulator::capture = emulator::Capture::recording;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *out) {
    auto work = std::make_shared<const Work>(std::exchange(emulator::recorded, {}));
    const bool valid = emulator::capture == emulator::Capture::recording;
    emulator::capture = emulator::Capture::none;
    *out = valid ? new emulated_graph{std::move(work)} : nullptr;
    return valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
    *out = new emulated_graph(*graph);
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    emulator::queue([work = graph->work] {
        for (const std::function<void()> &one : *work)
            one();
    });
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete graph;
    return cudaSuccess;
}

// For tests: a device that takes work and does none.
extern "C" void emulator_stall(int on) {
    emulator::the_queue().stall(on != 0);
}
