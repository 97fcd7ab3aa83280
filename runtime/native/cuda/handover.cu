// handover.cu: a layer that two sides compute. The device posts what the CPU needs to host memory and later
// adds what the CPU answers to its own shares. Every packet says by its value which exchange it belongs to;
// values go up from one exchange to the next, so that nothing is ever reset; *base is written before a step,
// so that a graph can be replayed.
#include "device.cuh"
#include "operations.h"
#include "wait_value.h"

namespace pi_cuda {
namespace {

constexpr unsigned packet_threads = 128; // of a block, a packet each: on many processors, since all wait
constexpr uint32_t packet_words = 3;
constexpr uint32_t polls_between_checks = 64; // a poll is an exchange over the bus, about 1 us

__device__ uint32_t halves_of(const float *x) {
    const __half2 both = __floats2half2_rn(x[0], x[1]);
    return *reinterpret_cast<const uint32_t *>(&both);
}

// Block (packets of a token, token): a thread a packet, of x or, after those, of the mask.
__global__ void __launch_bounds__(packet_threads) post_kernel(const __grid_constant__ pi_gpu_post work) {
    const uint32_t packet = blockIdx.x * packet_threads + threadIdx.x, token = blockIdx.y;
    const uint32_t x_words = work.halves != 0 ? work.n_embd / 2 : work.n_embd;
    const uint32_t x_packets = (x_words + packet_words - 1) / packet_words;
    const bool is_x = packet < x_packets;
    const uint32_t first = packet_words * (is_x ? packet : packet - x_packets);
    const uint32_t n_words = is_x ? x_words : work.mask_words;
    if (work.stamp != nullptr && packet == 0 && token == 0)
        *work.stamp = global_time_ns();
    if (first >= n_words)
        return;
    const float *x = work.x + uint64_t{token} * work.n_embd;
    const uint32_t *mask = work.mask + uint64_t{token} * work.mask_stride;
    uint32_t word[packet_words] = {};
#pragma unroll
    for (uint32_t i = 0; i < packet_words; ++i) {
        if (first + i >= n_words)
            continue;
        if (!is_x)
            word[i] = mask[first + i];
        else
            word[i] = work.halves != 0 ? halves_of(x + 2 * (first + i)) : __float_as_uint(x[first + i]);
    }
    const uint4 whole = {word[0], word[1], word[2], *work.base + work.order};
    store_whole(work.out + uint64_t{token} * work.out_stride + packet, whole);
}

// Whether there is still something to wait for. The first to give up says so to all others.
__device__ bool may_come(const pi_gpu_merge &work, uint32_t value, uint64_t begin) {
    if (*static_cast<volatile uint32_t *>(work.given_up) != 0)
        return false;
    const bool late = global_time_ns() - begin > work.limit_ns;
    if (late)
        *static_cast<volatile uint32_t *>(work.late) = value;
    if (!late && *static_cast<const volatile uint32_t *>(work.abandoned) == 0)
        return true;
    *static_cast<volatile uint32_t *>(work.given_up) = 1;
    return false;
}

// The packet, once it has come; false: the step is given up, here or in an earlier layer.
__device__ bool await_packet(const pi_gpu_merge &work, const pi_gpu_packet *at, uint4 &packet) {
    const uint32_t value = *work.base + work.order;
    packet = load_whole(at);
    if (packet.w == value)
        return true;
    const uint64_t begin = global_time_ns();
    for (uint32_t polls = 1; packet.w != value; ++polls) {
        if (polls % polls_between_checks == 0 && !may_come(work, value, begin))
            return false;
        be_patient();
        packet = load_whole(at);
    }
    return true;
}

// What the device adds by itself to an element.
__device__ float shares_of(const pi_gpu_merge &work, uint64_t i) {
    float sum = 0;
    for (const float *share : {work.share[0], work.share[1]}) {
        if (share != nullptr)
            sum += share[i];
    }
    return sum;
}

__device__ float element(const uint4 &packet, uint32_t i, bool halves) {
    const uint32_t words[packet_words] = {packet.x, packet.y, packet.z};
    if (!halves)
        return __uint_as_float(words[i]);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)))));
}

// Block (packets of a token, token): a thread the elements of a packet, whether or not there is an answer.
template <bool halves>
__global__ void __launch_bounds__(packet_threads) merge_kernel(const __grid_constant__ pi_gpu_merge work) {
    constexpr uint32_t n_each = halves ? 2 * packet_words : packet_words;
    const uint32_t packet = blockIdx.x * packet_threads + threadIdx.x, token = blockIdx.y;
    const uint32_t first = n_each * packet;
    if (first < work.n_embd) {
        const uint32_t n = min(n_each, work.n_embd - first);
        const uint64_t at = uint64_t{token} * work.n_embd + first;
        float sum[n_each], y[n_each]; // there before the answer is
#pragma unroll
        for (uint32_t i = 0; i < n_each; ++i) {
            y[i] = i < n ? work.y[at + i] : 0.0f;
            sum[i] = i < n ? shares_of(work, at + i) : 0.0f;
        }
        uint4 answer = {0, 0, 0, 0};
        if (work.answer != nullptr &&
            !await_packet(work, work.answer + token * work.answer_stride + packet, answer))
            return;
#pragma unroll
        for (uint32_t i = 0; i < n_each; ++i) {
            if (i < n)
                work.y[at + i] =
                    y[i] + (work.answer == nullptr ? sum[i] : sum[i] + element(answer, i, halves));
        }
    }
    if (work.stamp != nullptr && packet == 0 && token == 0)
        *work.stamp = global_time_ns();
}

__global__ void stamp_kernel(uint64_t *at) {
    if (threadIdx.x == 0)
        *at = global_time_ns();
}

} // namespace

int32_t allocate_host(pi_gpu *gpu, uint64_t n_bytes, uint32_t combined, void **host, void **device) {
    return operate(gpu, [&](pi_gpu &) {
        *host = *device = nullptr;
        if (n_bytes == 0)
            return; // where nothing is, nothing can be mapped
        void *data = nullptr;
        unsigned how = cudaHostAllocMapped;
        if (combined != 0)
            how |= cudaHostAllocWriteCombined;
        check(cudaHostAlloc(&data, n_bytes, how), "pinning host memory");
        const cudaError_t mapped = cudaHostGetDevicePointer(device, data, 0);
        if (mapped != cudaSuccess)
            cudaFreeHost(data);
        check(mapped, "mapping host memory");
        *host = data;
    });
}

int32_t release_host(pi_gpu *gpu, void *host) {
    return operate(gpu, [&](pi_gpu &) {
        check(cudaStreamSynchronize(gpu->stream), "waiting for the device");
        check(cudaFreeHost(host), "releasing host memory");
    });
}

int32_t query(pi_gpu *gpu, uint32_t *busy) {
    return operate(gpu, [&](pi_gpu &) {
        const cudaError_t state = cudaStreamQuery(gpu->stream);
        *busy = state == cudaErrorNotReady ? 1 : 0;
        if (state != cudaErrorNotReady)
            check(state, "the device's work");
    });
}

// Where a display hangs on the device the driver ends kernels that take seconds.
int32_t waits(pi_gpu *gpu, uint32_t *spin, uint32_t *gate) {
    return operate(gpu, [&](pi_gpu &) {
        int ends_kernels = 0;
        check(cudaDeviceGetAttribute(&ends_kernels, cudaDevAttrKernelExecTimeout, gpu->ordinal),
              "asking for the limit of kernels");
        *spin = ends_kernels == 0 ? 1 : 0;
        *gate = can_wait_for_values() ? 1 : 0;
    });
}

int32_t post(pi_gpu *gpu, const pi_gpu_post *work) {
    return operate(gpu, [&](pi_gpu &device) {
        const unsigned packets = ceil_div(work->halves != 0 ? work->n_embd / 2 : work->n_embd, packet_words) +
                                 ceil_div(work->mask_words, packet_words);
        launch("posting to the CPU", device, post_kernel,
               dim3(ceil_div(packets, packet_threads), work->n_tokens), packet_threads, 0, *work);
    });
}

int32_t merge(pi_gpu *gpu, const pi_gpu_merge *work) {
    return operate(gpu, [&](pi_gpu &device) {
        const bool halves = work->halves != 0;
        const dim3 grid(ceil_div(work->n_embd, (halves ? 2 : 1) * packet_words * packet_threads),
                        work->n_tokens);
        if (work->gate != nullptr)
            wait_for_value(device.stream, work->gate, 1);
        launch("merging shares", device, halves ? merge_kernel<true> : merge_kernel<false>, grid,
               packet_threads, 0, *work);
    });
}

int32_t stamp(pi_gpu *gpu, uint64_t *at) {
    return operate(
        gpu, [&](pi_gpu &device) { launch("reading the clock", device, stamp_kernel, 1, warp_size, 0, at); });
}

} // namespace pi_cuda
