// ffn.cpp: the feed-forward block on the CPU. Of few tokens the gates decide which rows of up and down are
// read; larger steps compute every neuron, since together their tokens touch nearly all.
#include "ffn.h"

#include <algorithm>

namespace pi {
namespace {

// What the down product through tiles takes for a neuron and a token, relative to adding its row: with vector
// code, and where axpy unpacks block by block (docs/LOG.md).
constexpr double tile_share = 0.3, tile_share_unpacked = 0.05;

// out [n] = act(gate) * up; returns how many neurons fired (all, where the activation is never silent).
int64_t activate(const CpuStream &stream, const ModelConfig &config, const float *gate, const float *up,
                 int64_t n, float *out) {
    if (config.activation == Activation::relu)
        return stream.kernels.gated_relu(gate, up, n, config.activation_threshold, out);
    stream.kernels.gated_silu(gate, up, n, out);
    return n;
}

// gate [n_tokens, n_neurons] becomes act(gate) * up; counts and records what fired. Returns how many did.
int64_t activate_tokens(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                        float *gate, const float *up) {
    const auto n_neurons = static_cast<int64_t>(args.neuron_end - args.neuron_begin);
    std::vector<int64_t> n_fired(n_tokens);
    stream.pool.run(n_tokens, [&](int64_t i, uint32_t) {
        float *activations = gate + i * n_neurons;
        n_fired[static_cast<size_t>(i)] =
            activate(stream, *args.config, activations, up + i * n_neurons, n_neurons, activations);
        record_fired(args, token_begin + static_cast<uint32_t>(i), nullptr, activations, n_neurons);
    });
    int64_t n_all = 0;
    for (uint32_t i = 0; i < n_tokens; ++i) {
        const bool dense = args.modes[token_begin + i] == PI_FFN_DENSE;
        args.counts->active += static_cast<uint64_t>(dense ? n_neurons : n_fired[i]);
        n_all += n_fired[i];
    }
    args.counts->total += static_cast<uint64_t>(n_neurons) * n_tokens;
    args.counts->guessed += static_cast<uint64_t>(n_neurons) * n_tokens;
    return n_all;
}

// The rows of down_t whose activation [n_tokens, n_neurons] is not 0, for a few tokens at a time.
void sum_active_rows(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     const float *activations) {
    const auto n_neurons = static_cast<int64_t>(args.neuron_end - args.neuron_begin);
    const auto n_all = static_cast<uint64_t>(n_neurons) * std::min(n_tokens, max_union_tokens);
    const Fired fired{stream.fired_index.as<int32_t>(n_all), stream.fired_coef.floats(n_all),
                      stream.fired_count.as<int64_t>(max_union_tokens), n_neurons};
    for (uint32_t begin = 0; begin < n_tokens; begin += max_union_tokens) {
        const uint32_t n = std::min(max_union_tokens, n_tokens - begin);
        stream.pool.run(n, [&](int64_t i, uint32_t) {
            const float *from = activations + (begin + i) * n_neurons;
            int32_t *index = fired.index + i * n_neurons;
            float *coef = fired.coef + i * n_neurons;
            int64_t n_fired = 0;
            for (int64_t neuron = 0; neuron < n_neurons; ++neuron) { // no branch: none could be predicted
                index[n_fired] = static_cast<int32_t>(neuron);
                coef[n_fired] = from[neuron];
                n_fired += from[neuron] != 0 ? 1 : 0;
            }
            fired.n[i] = n_fired;
        });
        accumulate_down(stream, args, token_begin + begin, n, fired);
    }
}

// Tiles multiply every neuron with a whole panel of tokens.
bool sums_rows(const CpuStream &stream, const TypeInfo &type, int64_t n_fired, int64_t n_neurons,
               int64_t n_tokens) {
    const double share = type.kernel_index <= PI_KT_Q4_1 ? tile_share : tile_share_unpacked;
    const int64_t panel = stream.kernels.gemm_panel;
    const int64_t padded = (n_tokens + panel - 1) / panel * panel;
    return static_cast<double>(n_fired) < share * static_cast<double>(n_neurons * padded);
}

// Every neuron of every token of the range: the dense block, in either layout.
void run_dense(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens) {
    const LayerWeights &layer = *args.layer;
    const uint64_t n_neurons = args.neuron_end - args.neuron_begin;
    const uint64_t n_embd = args.config->n_embd;
    float *gate = stream.gate.floats(n_tokens * n_neurons);
    float *up = stream.up.floats(n_tokens * n_neurons);
    const Product products[] = {{&layer.gate, args.neuron_begin, args.neuron_end, nullptr, gate},
                                {&layer.up, args.neuron_begin, args.neuron_end, nullptr, up}};
    const uint32_t *positions = args.positions + token_begin;
    cpu_matmul(stream, products, args.normed + token_begin * n_embd, positions, n_tokens);
    const int64_t n_fired = activate_tokens(stream, args, token_begin, n_tokens, gate, up);

    float *out = args.out + token_begin * n_embd;
    if (!args.config->sparse_layout) {
        const Matrix columns = layer.down.columns(args.neuron_begin, args.neuron_end);
        const Product down = whole(columns, nullptr, out);
        cpu_matmul(stream, {&down, 1}, gate, positions, n_tokens);
    } else if (sums_rows(stream, *layer.down_t.type, n_fired, static_cast<int64_t>(n_neurons), n_tokens)) {
        return sum_active_rows(stream, args, token_begin, n_tokens, gate);
    } else {
        matmul_transposed(stream, layer.down_t, args.neuron_begin, args.neuron_end, gate, n_tokens, out);
    }
    deliver(stream, args, token_begin, n_tokens);
}

} // namespace

void record_fired(const FfnArgs &args, uint32_t token, const int32_t *index, const float *activations,
                  int64_t n) {
    if (args.fired == nullptr)
        return;
    // Byte by byte: of a split layer the device writes the bytes before.
    auto *bytes = reinterpret_cast<uint8_t *>(args.fired + token * args.fired_stride);
    for (int64_t i = 0; i < n; ++i) {
        if (activations[i] == 0)
            continue;
        const auto neuron = args.neuron_begin + static_cast<uint64_t>(index == nullptr ? i : index[i]);
        bytes[neuron / 8] = static_cast<uint8_t>(bytes[neuron / 8] | 1u << (neuron % 8));
    }
}

void deliver(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens) {
    if (args.deliver == nullptr)
        return;
    for_columns(stream, n_tokens, args.config->n_embd, [&](uint32_t token, uint32_t begin, uint32_t n) {
        (*args.deliver)(token_begin + token, begin, begin + n);
    });
}

void cpu_ffn(CpuStream &stream, const FfnArgs &args) {
    if (!args.config->sparse_layout)
        return run_dense(stream, args, 0, args.n_tokens);
    const auto is_masked = [&](uint32_t token) { return args.modes[token] == PI_FFN_PREDICTED; };
    const bool few = args.n_tokens <= max_union_tokens && args.config->activation == Activation::relu;
    // Runs of tokens: masked ones a few at a time, the others together when there are enough of them.
    for (uint32_t begin = 0, end = 0; begin < args.n_tokens; begin = end) {
        const uint32_t most = few || is_masked(begin) ? max_union_tokens : args.n_tokens;
        end = begin + 1;
        while (end < args.n_tokens && end - begin < most && (few || is_masked(end) == is_masked(begin)))
            ++end;
        if (few || is_masked(begin)) {
            run_sparse(stream, args, begin, end - begin);
        } else {
            run_dense(stream, args, begin, end - begin);
        }
    }
}

} // namespace pi
