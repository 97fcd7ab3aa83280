// all_neurons.cuh: a token's neurons where nothing chooses among them: gates, and the ups of those that are
// open, by tiles. Blocks take a few neighbours in turns, as the first neurons fire most in many files.
#pragma once

#include "neurons.cuh"
#include "tiles.cuh"

namespace pi_cuda {

struct AllNeuronsLaunch {
    NeuronsLaunch of;
    Shares shares;
    uint32_t tiles_bytes; // of shared memory, before the list of open neurons
    uint32_t most;        // neurons of a block
};

constexpr uint32_t neighbours = 4;

__device__ __forceinline__ uint32_t neuron_of_block(uint32_t i) {
    return (i / neighbours * gridDim.x + blockIdx.x) * neighbours + i % neighbours;
}

__device__ __forceinline__ uint32_t neurons_of_block(uint32_t n_rows) {
    const uint32_t turns = n_rows / (neighbours * gridDim.x), begin = neuron_of_block(turns * neighbours);
    return turns * neighbours + (begin < n_rows ? min(n_rows - begin, neighbours) : 0);
}

// Rows a of one matrix and b of another.
template <int type>
__device__ __forceinline__ RowPair rows_of_neurons(const NeuronsLaunch &work, const uint8_t *first,
                                                   uint32_t a, const uint8_t *second, uint32_t b) {
    const uint32_t n_blocks = work.vectors.n_cols / layouts[type].block_elements;
    return {{{first + work.row_stride * a, n_blocks}, {second + work.row_stride * b, n_blocks}}};
}

// Gates and ups of eight neurons a tile.
template <int type>
__device__ __forceinline__ void gates_and_ups(const NeuronsLaunch &work, uint32_t n, Tiles<type, 1> &tiles) {
    const auto rows_of = [&](uint32_t tile) {
        const uint32_t i = neuron_of_block(min(8 * tile + threadIdx.x % warp_size / row_lanes, n - 1));
        return rows_of_neurons<type>(work, work.gate, i, work.up, i);
    };
    tiles.begin(rows_of, 0);
    wait_for_previous();
    tiles.stage();
    tiles.multiply(rows_of, (n + 7) / 8, [&](uint32_t begin, uint32_t end) {
        for (uint32_t i = 8 * begin + threadIdx.x; i < min(8 * end, n); i += tile_threads) {
            const uint32_t row = (i / 8 - begin) * 16 + i % 8;
            const float activation = activation_of(work, tiles.total(row, 0));
            work.out[neuron_of_block(i)] = activation * tiles.total(row + 8, 0);
        }
    });
}

// Gates of 16 neurons a tile, whose open ones are listed unless there are no ups here.
template <int type>
__device__ __forceinline__ void gates_alone(const NeuronsLaunch &work, uint32_t n, const NeuronList &open,
                                            Tiles<type, 1> &tiles) {
    const auto rows_of = [&](uint32_t tile) {
        const uint32_t i = 16 * tile + threadIdx.x % warp_size / row_lanes,
                       a = neuron_of_block(min(i, n - 1)), b = neuron_of_block(min(i + 8, n - 1));
        return rows_of_neurons<type>(work, work.gate, a, work.gate, b);
    };
    tiles.begin(rows_of, 0);
    wait_for_previous();
    tiles.stage();
    tiles.multiply(rows_of, (n + 15) / 16, [&](uint32_t begin, uint32_t end) {
        for (uint32_t i = 16 * begin + threadIdx.x; i < min(16 * end, n); i += tile_threads) {
            const float activation = activation_of(work, tiles.total(i - 16 * begin, 0));
            if (activation != 0)
                open.add(neuron_of_block(i), activation);
            if (activation == 0 || work.up == nullptr)
                work.out[neuron_of_block(i)] = activation;
        }
    });
}

template <int type>
__device__ __forceinline__ void open_ups(const NeuronsLaunch &work, const NeuronList &open,
                                         Tiles<type, 1> &tiles) {
    const uint32_t n = *open.n;
    const auto rows_of = [&](uint32_t tile) {
        const uint32_t i = 16 * tile + threadIdx.x % warp_size / row_lanes;
        return rows_of_neurons<type>(work, work.up, open.row[min(i, n - 1)], work.up,
                                     open.row[min(i + 8, n - 1)]);
    };
    if (n == 0)
        return;
    tiles.begin(rows_of, 0);
    tiles.multiply(rows_of, (n + 15) / 16, [&](uint32_t begin, uint32_t end) {
        for (uint32_t i = 16 * begin + threadIdx.x; i < min(16 * end, n); i += tile_threads)
            work.out[open.row[i]] = open.activation[i] * tiles.total(i - 16 * begin, 0);
    });
}

template <int type>
__global__ void __launch_bounds__(tile_threads, 1)
    all_neurons_kernel(const __grid_constant__ AllNeuronsLaunch launch) {
    PI_SHARED(uint4, shared);
    __shared__ float square_sums[tile_warps];
    __shared__ uint32_t n_open;
    const NeuronsLaunch &work = launch.of;
    auto *list = reinterpret_cast<uint32_t *>(shared + launch.tiles_bytes / 16);
    const NeuronList open = {list, reinterpret_cast<float *>(list) + launch.most, &n_open};
    const uint32_t n = neurons_of_block(work.n_rows);
    if (threadIdx.x == 0)
        n_open = 0;
    let_next_begin();
    Tiles<type, 1> tiles(work.vectors, launch.shares, shared, square_sums);
    if (work.relu == 0 && work.up != nullptr) {
        gates_and_ups<type>(work, n, tiles);
        n_open = n; // SiLU closes none
    } else {
        gates_alone<type>(work, n, open, tiles);
        __syncthreads(); // the list is whole
        if (work.up != nullptr)
            open_ups<type>(work, open, tiles);
    }
    if (threadIdx.x != 0 || work.n_active == nullptr)
        return;
    if (work.n_masked != nullptr)
        atomicAdd(work.n_masked, static_cast<unsigned long long>(n));
    atomicAdd(work.n_active, static_cast<unsigned long long>(n_open));
}

// Where nothing chooses, and they fit shared memory: whether they were started.
template <int type>
bool start_all_neurons(pi_gpu &gpu, const NeuronsLaunch &work) {
    if (work.gate == nullptr || work.mask != nullptr || work.logits.rows != nullptr)
        return false;
    const unsigned blocks = tile_blocks(gpu, work.n_rows);
    AllNeuronsLaunch launch{work, {}, 0, ceil_div(work.n_rows, neighbours * blocks) * neighbours};
    const uint32_t list_bytes = 2 * sizeof(uint32_t) * launch.most;
    launch.shares =
        shares_of<type, 1>(work.vectors.n_cols, 2 * launch.most, most_shared_bytes(gpu) - list_bytes);
    launch.tiles_bytes = tiles_bytes<type, 1>(launch.shares);
    if (launch.shares.most_rows == 0)
        return false;
    launch_early("a token's neurons", gpu, all_neurons_kernel<type>, blocks, tile_threads,
                 launch.tiles_bytes + list_bytes, launch);
    return true;
}

} // namespace pi_cuda
