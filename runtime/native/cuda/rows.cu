// rows.cu: rows of matrices: taken apart when they arrive, fetched as floats, dequantised to float16.
#include "rows.cuh"

#include "mma.cuh"
#include "operations.h"

#include <algorithm>

namespace pi_cuda {

void stage(pi_gpu &gpu, const void *host, uint64_t n_bytes, void *to);

namespace {

constexpr uint64_t piece_bytes = 32u << 20; // of raw rows on the device before they are taken apart
constexpr unsigned threads = 256;

// A thread a block of the file: raw [n_rows, row_bytes] -> out [n_rows, stride].
__global__ void take_apart_kernel(const uint8_t *raw, uint64_t row_bytes, Layout layout, uint32_t n_blocks,
                                  uint32_t n_rows, uint8_t *out, uint64_t stride) {
    const uint64_t total = uint64_t{n_rows} * n_blocks;
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
         i += uint64_t{gridDim.x} * blockDim.x) {
        const uint64_t row = i / n_blocks, block = i % n_blocks;
        const uint8_t *from = raw + row * row_bytes + block * layout.block_bytes;
        uint8_t *to = out + row * stride;
        for (uint32_t f = 0; f < layout.n_fields; ++f) {
            const Field field = layout.fields[f];
            for (uint32_t byte = 0; byte < field.bytes; ++byte)
                to[block * field.bytes + byte] = from[field.offset + byte];
            to += uint64_t{n_blocks} * field.bytes;
        }
    }
}

template <int type>
__global__ void fetch_kernel(pi_gpu_rows rows, const int32_t *tokens, float *out) {
    constexpr uint32_t width = Type<type>::width, block_elements = layouts[type].block_elements;
    const RowView row = {static_cast<const uint8_t *>(rows.data) +
                             rows.row_stride * static_cast<uint32_t>(tokens[blockIdx.x]),
                         rows.n_cols / block_elements};
    float values[width];
    for (uint32_t slice = threadIdx.x; slice < rows.n_cols / width; slice += blockDim.x) {
        unpack<type>(Type<type>::load(row, slice), values);
        auto *to = reinterpret_cast<float4 *>(out + uint64_t{rows.n_cols} * blockIdx.x + slice * width);
#pragma unroll
        for (uint32_t j = 0; j < width / 4; ++j)
            to[j] = {values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]};
    }
}

// A thread a slice, whose pieces of 16 bytes go through shared memory, so that a warp writes 512 bytes that
// lie side by side, whatever a type's width. Piece j of lane i of a warp is at i * pieces + (j ^ turn): eight
// lanes fall into different banks. out [n_rows, n_cols], fewer than 2^31 slices
template <int type>
__global__ void __launch_bounds__(threads) to_half_kernel(pi_gpu_rows rows, __half *out) {
    constexpr uint32_t width = Type<type>::width, pieces = width / 8;
    __shared__ uint4 shared[threads * pieces];
    const uint32_t lane = threadIdx.x % warp_size, turn = lane * pieces / 8 % pieces;
    uint4 *mine = shared + (threadIdx.x - lane) * pieces; // the warp's
    const uint32_t per_row = rows.n_cols / width;
    const uint32_t total = rows.n_rows * per_row, step = gridDim.x * threads;
    for (uint32_t begin = blockIdx.x * threads + threadIdx.x - lane; begin < total; begin += step) {
        if (const uint32_t i = begin + lane; i < total) {
            const uint32_t r = i / per_row;
            const RowView row = {static_cast<const uint8_t *>(rows.data) + rows.row_stride * r,
                                 rows.n_cols / layouts[type].block_elements};
            float values[width];
            unpack<type>(Type<type>::load(row, i - r * per_row), values);
#pragma unroll
            for (uint32_t j = 0; j < pieces; ++j) {
                const float *v = values + 8 * j;
                mine[lane * pieces + (j ^ turn)] = {pack_halves(v[0], v[1]), pack_halves(v[2], v[3]),
                                                    pack_halves(v[4], v[5]), pack_halves(v[6], v[7])};
            }
        }
        __syncwarp();
        auto *to = reinterpret_cast<uint4 *>(out) + uint64_t{begin} * pieces;
#pragma unroll
        for (uint32_t j = 0; j < pieces; ++j) {
            const uint32_t at = j * warp_size + lane, of = at / pieces;
            if (begin + of < total)
                to[at] = mine[of * pieces + (at % pieces ^ of * pieces / 8 % pieces)];
        }
        __syncwarp();
    }
}

// raw [n_rows, row_bytes] on the device
void queue_take_apart(pi_gpu &gpu, const uint8_t *raw, uint64_t row_bytes, const pi_gpu_rows &rows) {
    const Layout &layout = layouts[rows.kernel_type];
    const uint32_t n_blocks = rows.n_cols / layout.block_elements;
    const unsigned grid = std::min(ceil_div(uint64_t{rows.n_rows} * n_blocks, threads), 65536u);
    launch("taking rows apart", gpu, take_apart_kernel, grid, threads, 0, raw, row_bytes, layout, n_blocks,
           rows.n_rows, static_cast<uint8_t *>(const_cast<void *>(rows.data)), rows.row_stride);
}

void upload_piece(pi_gpu &gpu, const uint8_t *host, uint64_t row_bytes, const pi_gpu_rows &rows,
                  uint32_t first, uint32_t n) {
    auto *raw = scratch_of<uint8_t>(gpu, gpu.tile, n * row_bytes);
    stage(gpu, host + first * row_bytes, n * row_bytes, raw);
    pi_gpu_rows part = rows;
    part.data = static_cast<const uint8_t *>(rows.data) + first * rows.row_stride;
    part.n_rows = n;
    queue_take_apart(gpu, raw, row_bytes, part);
}

uint32_t checked_slot(uint32_t slot) {
    if (slot >= pi_gpu::n_slots)
        throw Failure{PI_FAILURE, "there is no such slot"};
    return slot;
}

// The file's rows are the device's; lengths are multiples of 32, so the stride is the row's bytes.
bool lies_as_in_file(const pi_gpu_rows &rows) {
    return layouts[rows.kernel_type].n_fields == 0;
}

} // namespace

void require_rows(const pi_gpu_rows &rows) {
    if (stride_of(rows.kernel_type, rows.n_cols) == 0)
        throw Failure{PI_FAILURE,
                      "rows of " + std::to_string(rows.n_cols) +
                          " elements: the device's kernels take multiples of 32, of whole blocks"};
}

void dequantise_to_half(pi_gpu &gpu, const pi_gpu_rows &rows, __half *out) {
    for_type(rows.kernel_type, [&]<int type>() {
        if constexpr (Type<type>::width >= 8) {
            const uint64_t slices = uint64_t{rows.n_rows} * (rows.n_cols / Type<type>::width);
            launch("dequantising", gpu, to_half_kernel<type>, std::min(ceil_div(slices, threads), 65536u),
                   threads, 0, rows, out);
        } else {
            throw Failure{PI_FAILURE, "float32 rows are never rounded to float16"};
        }
    });
}

uint64_t row_stride(uint32_t kernel_type, uint32_t n_cols) {
    return stride_of(kernel_type, n_cols);
}

int32_t upload_rows(pi_gpu *gpu, const void *host, uint64_t row_bytes, const pi_gpu_rows *rows) {
    return operate(gpu, [&](pi_gpu &device) {
        require_rows(*rows);
        if (rows->n_rows == 0)
            return; // a device starts no kernel without blocks
        device.rows_arrive = true;
        const auto *from = static_cast<const uint8_t *>(host);
        if (lies_as_in_file(*rows))
            return stage(device, from, rows->n_rows * row_bytes, const_cast<void *>(rows->data));
        const auto each = static_cast<uint32_t>(std::max<uint64_t>(piece_bytes / row_bytes, 1));
        for (uint32_t first = 0; first < rows->n_rows; first += each)
            upload_piece(device, from, row_bytes, *rows, first, std::min(each, rows->n_rows - first));
    });
}

int32_t bring(pi_gpu *gpu, uint32_t slot, const void *host, uint64_t n_bytes, void *raw) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "bringing weights");
        const cudaEvent_t brought = device.brought[checked_slot(slot)];
        check(cudaStreamWaitEvent(device.arrivals, device.apart, 0), "queueing a wait");
        check(cudaMemcpyAsync(raw, host, n_bytes, cudaMemcpyDefault, device.arrivals),
              "copying weights to the device");
        ++device.n_launches;
        check(cudaEventRecord(brought, device.arrivals), "recording an event");
        check(cudaStreamWaitEvent(device.stream, brought, 0), "queueing a wait");
    });
}

int32_t await_brought(pi_gpu *gpu, uint32_t slot) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "waiting for a copy");
        check(cudaEventSynchronize(device.brought[checked_slot(slot)]), "waiting for a copy to the device");
    });
}

int32_t take_apart(pi_gpu *gpu, const void *raw, uint64_t row_bytes, const pi_gpu_rows *rows) {
    return operate(gpu, [&](pi_gpu &device) {
        require_rows(*rows);
        require_no_capture(device, "taking rows apart");
        device.rows_arrive = true;
        if (!lies_as_in_file(*rows)) {
            queue_take_apart(device, static_cast<const uint8_t *>(raw), row_bytes, *rows);
        } else {
            check(cudaMemcpyAsync(const_cast<void *>(rows->data), raw, rows->n_rows * row_bytes,
                                  cudaMemcpyDeviceToDevice, device.stream),
                  "copying on the device");
            ++device.n_launches;
        }
        check(cudaEventRecord(device.apart, device.stream), "recording an event");
    });
}

int32_t fetch_rows(pi_gpu *gpu, const pi_gpu_rows *rows, const int32_t *tokens, uint32_t n, float *out) {
    return operate(gpu, [&](pi_gpu &device) {
        require_rows(*rows);
        for_type(rows->kernel_type, [&]<int type>() {
            launch("fetching rows", device, fetch_kernel<type>, n, threads, 0, *rows, tokens, out);
        });
    });
}

} // namespace pi_cuda
