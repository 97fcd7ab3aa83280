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
constexpr uint32_t packet_words = PI_GPU_PACKET_WORDS, packet_elements = PI_GPU_PACKET_ELEMENTS;
constexpr uint32_t polls_between_checks = 64; // a poll is an exchange over the bus, about 1 us

__device__ uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

// See pi_gpu_packet.
__device__ uint4 pack(const float (&x)[packet_elements], uint32_t value) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < packet_elements; ++i)
        largest = larger(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    const uint32_t exponent = largest >> 23, step = exponent == 255 ? 255 : larger(exponent, 15u) - 14;
    const float inverse = __uint_as_float(step == 255 ? 0 : (254 - step) << 23);
    uint32_t word[packet_words] = {};
#pragma unroll
    for (uint32_t i = 0; i < packet_elements; ++i) {
        const float rounded = x[i] * inverse + 12582912.0f; // 1.5 x 2^23: the integer is in the lowest bits
        const int32_t integer = static_cast<int32_t>(__float_as_uint(rounded) - 0x4b400000u);
        word[i / 2] |= (static_cast<uint32_t>(integer > 32767 ? 32767 : integer) & 0xffffu) << (16 * (i % 2));
    }
    return {word[0], word[1], word[2], value << 8 | step};
}

__device__ float element(const uint4 &packet, uint32_t i) {
    const uint32_t words[packet_words] = {packet.x, packet.y, packet.z};
    const auto integer = static_cast<int16_t>(words[i / 2] >> (16 * (i % 2)));
    return static_cast<float>(integer) * __uint_as_float((packet.w & 255u) << 23);
}

// 1 / sqrt(mean of squares + eps) of the token, for every thread of a block.
__device__ float scale_of(const pi_gpu_post_x &work, const float *x) {
    __shared__ float shared[warp_size];
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < work.n_embd / 4; i += packet_threads) {
        const float4 four = __ldcg(reinterpret_cast<const float4 *>(x) + i);
        squares += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
    }
    squares = block_sum(squares, shared);
    return 1.0f / sqrtf(squares / static_cast<float>(work.n_embd) + work.norm.eps);
}

// Block (packets of a token, token): a thread a packet. With a norm every block sums up the token's squares.
__global__ void __launch_bounds__(packet_threads) post_kernel(const __grid_constant__ pi_gpu_post_x work) {
    const uint32_t packet = blockIdx.x * packet_threads + threadIdx.x, token = blockIdx.y;
    const uint64_t row = uint64_t{token} * work.n_embd;
    const float *gain = work.norm.gain;
    let_next_begin();
    wait_for_previous();
    if (work.post.stamp != nullptr && packet == 0 && token == 0)
        *work.post.stamp = global_time_ns();
    const float scale = gain == nullptr ? 1.0f : scale_of(work, work.x + row);
    if (packet * packet_elements >= work.n_embd)
        return;
    float elements[packet_elements];
#pragma unroll
    for (uint32_t i = 0; i < packet_elements; ++i) {
        const uint32_t at = packet_elements * packet + i;
        elements[i] = 0;
        if (at >= work.n_embd)
            continue;
        elements[i] = __ldcg(work.x + row + at) * scale;
        if (gain != nullptr)
            work.norm.out[row + at] = elements[i] *= gain[at];
    }
    store_whole(work.post.out + uint64_t{token} * work.post.out_stride + packet,
                pack(elements, __ldcg(work.post.base) + work.post.order));
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
    const uint32_t value = __ldcg(work.base) + work.order;
    packet = load_whole(at);
    if (packet.w >> 8 == value)
        return true;
    const uint64_t begin = global_time_ns();
    for (uint32_t polls = 1; packet.w >> 8 != value; ++polls) {
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
            sum += __ldcg(share + i);
    }
    return sum;
}

// Block (packets of a token, token): a thread the elements of a packet, whether or not there is an answer.
__global__ void __launch_bounds__(packet_threads) merge_kernel(const __grid_constant__ pi_gpu_merge work) {
    const uint32_t packet = blockIdx.x * packet_threads + threadIdx.x, token = blockIdx.y;
    const uint32_t first = packet_elements * packet;
    let_next_begin();
    wait_for_previous();
    if (first < work.n_embd) {
        const uint32_t n = min(packet_elements, work.n_embd - first);
        const uint64_t at = uint64_t{token} * work.n_embd + first;
        float sum[packet_elements], y[packet_elements]; // there before the answer is
#pragma unroll
        for (uint32_t i = 0; i < packet_elements; ++i) {
            y[i] = i < n ? __ldcg(work.y + at + i) : 0.0f;
            sum[i] = i < n ? shares_of(work, at + i) : 0.0f;
        }
        uint4 answer = {0, 0, 0, 0};
        if (work.answer != nullptr &&
            !await_packet(work, work.answer + token * work.answer_stride + packet, answer))
            return;
#pragma unroll
        for (uint32_t i = 0; i < packet_elements; ++i) {
            if (i < n)
                work.y[at + i] = y[i] + (work.answer == nullptr ? sum[i] : sum[i] + element(answer, i));
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

int32_t allocate_host(pi_gpu *gpu, uint64_t n_bytes, void **host, void **device) {
    return operate(gpu, [&](pi_gpu &) {
        *host = *device = nullptr;
        if (n_bytes == 0)
            return; // where nothing is, nothing can be mapped
        void *data = nullptr;
        check(cudaHostAlloc(&data, n_bytes, cudaHostAllocMapped), "pinning host memory");
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

int32_t post(pi_gpu *gpu, const pi_gpu_post_x *work) {
    return operate(gpu, [&](pi_gpu &device) {
        const dim3 grid(ceil_div(work->n_embd, packet_elements * packet_threads), work->n_tokens);
        launch_early("posting to the CPU", device, post_kernel, grid, packet_threads, 0, *work);
    });
}

int32_t merge(pi_gpu *gpu, const pi_gpu_merge *work) {
    return operate(gpu, [&](pi_gpu &device) {
        const dim3 grid(ceil_div(work->n_embd, packet_elements * packet_threads), work->n_tokens);
        if (work->gate == nullptr)
            return launch_early("merging shares", device, merge_kernel, grid, packet_threads, 0, *work);
        wait_for_value(device.stream, work->gate, 1); // after which nothing begins early
        launch("merging shares", device, merge_kernel, grid, packet_threads, 0, *work);
    });
}

int32_t stamp(pi_gpu *gpu, uint64_t *at) {
    return operate(
        gpu, [&](pi_gpu &device) { launch("reading the clock", device, stamp_kernel, 1, warp_size, 0, at); });
}

} // namespace pi_cuda
