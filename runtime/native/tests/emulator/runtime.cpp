// runtime.cpp: the queue of work, and the runtime's calls.
#include "emulator.h"

#include "cuda/wait_value.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

using Work = std::vector<std::function<void()>>;

// Work in the order in which it was recorded; arguments are copies, as a device's graph has them.
struct emulated_graph {
    std::shared_ptr<const Work> work;
};

// A stream that waits for another one is a second one: what it does comes as early as its waits allow, before
// work that was queued earlier. All others are one queue, in the program's order.
struct emulated_stream {
    bool second = false;
    uint64_t position = 0; // in the queue, before which nothing of a second stream is done
};
struct emulated_event {
    const emulated_stream *stream = nullptr; // null: not recorded yet
    uint64_t position = 0;                   // behind the work that it was recorded after
};

namespace emulator {
namespace {

enum class Capture { none, recording, invalid };
Capture capture = Capture::none; // of the program's thread
Work recorded;

// A thread of its own does the queued work, while the program does something else: but none before the
// program flushes the queue, as late as a device may begin.
class Queue {
  public:
    void add(std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        work_.push_back(std::move(work));
        ++added_;
    }
    uint64_t position() {
        const std::lock_guard lock(mutex_);
        return added_;
    }
    // Behind that position, or next where that is past. Returns the position behind it.
    uint64_t insert(uint64_t position, std::function<void()> work) {
        const std::lock_guard lock(mutex_);
        const uint64_t at = std::max(position, added_ - work_.size());
        work_.insert(work_.end() - static_cast<std::ptrdiff_t>(added_ - at), std::move(work));
        ++added_;
        released_ += at < released_ ? 1 : 0;
        return at + 1;
    }
    void flush() {
        const std::lock_guard lock(mutex_);
        release(added_);
    }
    void wait() { wait_for(position()); }
    // Until what is before that position is done; no more than that has to be.
    void wait_for(uint64_t position) {
        std::unique_lock lock(mutex_);
        release(position);
        changed_.wait(lock, [&] { return done_ >= position; });
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
    void release(uint64_t position) {
        if (!running_) {
            running_ = true;
            std::thread([this] { run(); }).detach();
        }
        released_ = std::max(released_, position);
        changed_.notify_all();
    }
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

namespace {
cudaError_t last_error = cudaSuccess; // of the program's thread
} // namespace

void refuse_launch() {
    last_error = cudaErrorInvalidValue;
}

} // namespace emulator

namespace {
constexpr size_t graph_bytes = 64u << 10; // of the device, for each that can be launched
size_t n_graphs = 0;
} // namespace

cudaError_t cudaGetLastError() {
    return std::exchange(emulator::last_error, cudaSuccess);
}

uint64_t pi_cuda::global_time_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
bool pi_cuda::can_wait_for_values() {
    return true;
}
void pi_cuda::wait_for_value(cudaStream_t, const uint32_t *at, uint32_t value) {
    emulator::queue([=] {
        while (*static_cast<const volatile uint32_t *>(at) < value)
            std::this_thread::yield();
    });
}
void pi_cuda::be_patient() {
    std::this_thread::yield();
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
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
    *out = {"emulated device", 4, 9, 0, 99 << 10};
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *, int, int) {
    return cudaErrorMemoryAllocation;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = size_t{4} << 30;
    *free_bytes = *total_bytes - graph_bytes * n_graphs;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **out, size_t n_bytes) {
    *out = std::calloc(n_bytes, 1);
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void *data) {
    std::free(data);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **out, size_t n_bytes) {
    *out = std::malloc(n_bytes);
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t n_bytes, unsigned) {
    *out = nullptr;
    if (n_bytes == 0)
        return cudaSuccess;
    *out = std::aligned_alloc(256, (n_bytes + 255) / 256 * 256);
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    *device = host;
    return host == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaFreeHost(void *data) {
    std::free(data);
    return cudaSuccess;
}
namespace {
std::vector<emulated_event *> events;

uint64_t insert_copy(uint64_t position, std::function<void()> copy) {
    const uint64_t behind = emulator::the_queue().insert(position, std::move(copy));
    for (emulated_event *event : events)
        event->position += event->position >= behind ? 1 : 0;
    return behind;
}
} // namespace

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, cudaMemcpyKind, cudaStream_t stream) {
    const auto copy = [=] { std::memcpy(to, from, n_bytes); };
    if (stream->second)
        stream->position = insert_copy(stream->position, copy);
    else
        emulator::queue(copy);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *data, int value, size_t n_bytes, cudaStream_t) {
    emulator::queue([=] { std::memset(data, value, n_bytes); });
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) {
    *out = new emulated_stream;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
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
    *out = new emulated_event;
    events.push_back(*out);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    std::erase(events, event);
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    *event = {stream, stream->second ? stream->position : emulator::the_queue().position()};
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!emulator::may_wait())
        return cudaErrorStreamCaptureUnsupported;
    emulator::the_queue().wait_for(event->position);
    return cudaSuccess;
}
// What a second stream has is in the queue already when another one waits for it.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (event->stream != nullptr && event->stream->second)
        return cudaSuccess;
    stream->second = true;
    stream->position = std::max(stream->position, event->position);
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
    ++n_graphs;
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
    emulator::flush_queue();
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    n_graphs -= graph != nullptr ? 1 : 0;
    delete graph;
    return cudaSuccess;
}

namespace {
int drives_a_display = 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
    *value = drives_a_display;
    return cudaSuccess;
}

// For tests: a device that ends long kernels, since a display hangs on it.
extern "C" __attribute__((visibility("default"))) void emulator_display(int on) {
    drives_a_display = on;
}
// For tests: a device that takes work and does none.
extern "C" __attribute__((visibility("default"))) void emulator_stall(int on) {
    emulator::the_queue().stall(on != 0);
}
