#include "weights.h"

#include "status.h"

#include <set>

namespace pi {
namespace {

std::string shape_text(const TensorView &tensor) {
    std::string text;
    for (const uint64_t dim : tensor.shape)
        text += (text.empty() ? "[" : ", ") + std::to_string(dim);
    return text + "]";
}

class Finder {
  public:
    explicit Finder(const Gguf &file) : file_(file) {}

    Matrix matrix(const std::string &name, uint64_t n_rows, uint64_t n_cols) {
        return checked(found(name), n_rows, n_cols);
    }
    // The number of rows is the tensor's own.
    Matrix matrix(const std::string &name, uint64_t n_cols) {
        const TensorView &tensor = found(name);
        return checked(tensor, tensor.dim(1), n_cols);
    }
    const float *vector(const std::string &name, uint64_t n) {
        const float *data = optional_vector(name, n);
        if (data == nullptr)
            throw_bad_file("tensor " + name + " is missing");
        return data;
    }
    const float *optional_vector(const std::string &name, uint64_t n) {
        const TensorView *tensor = file_.find_tensor(name);
        if (tensor == nullptr)
            return nullptr;
        used_.insert(tensor);
        if (tensor->type != PI_TYPE_F32 || tensor->shape.size() != 1 || tensor->dim(0) != n)
            throw_bad_file("tensor " + name + " is " + type_info(tensor->type).name + " " +
                           shape_text(*tensor) + ", not F32 [" + std::to_string(n) + "]");
        return reinterpret_cast<const float *>(tensor->bytes.data());
    }

    // A tensor that nothing asked for: the file means another function than is computed here.
    void require_all_used() const {
        for (const TensorView &tensor : file_.tensors()) {
            if (!used_.contains(&tensor))
                throw Error(PI_FAILURE, "this version has no use for tensor " + tensor.name,
                            "the model computes something that this version does not");
        }
    }

  private:
    const TensorView &found(const std::string &name) {
        const TensorView *tensor = file_.find_tensor(name);
        if (tensor == nullptr)
            throw_bad_file("tensor " + name + " is missing");
        used_.insert(tensor);
        return *tensor;
    }
    static Matrix checked(const TensorView &tensor, uint64_t n_rows, uint64_t n_cols) {
        if (tensor.shape.size() != 2 || tensor.dim(0) != n_cols || tensor.dim(1) != n_rows)
            throw_bad_file("tensor " + tensor.name + " has shape " + shape_text(tensor) + ", not [" +
                           std::to_string(n_cols) + ", " + std::to_string(n_rows) + "]");
        Matrix matrix;
        matrix.type = &type_info(tensor.type, tensor.name);
        matrix.n_rows = n_rows;
        matrix.n_cols = n_cols;
        matrix.row_bytes = matrix.type->row_bytes(n_cols);
        matrix.parts = {{Home::mapped_file, 0, n_rows, tensor.bytes.data()}};
        return matrix;
    }

    const Gguf &file_;
    std::set<const TensorView *> used_;
};

void find_attention(Finder &find, const ModelConfig &config, const std::string &prefix, LayerWeights &layer) {
    const uint32_t n_embd = config.n_embd;
    layer.attn_norm = find.vector(prefix + "attn_norm.weight", n_embd);
    layer.q = find.matrix(prefix + "attn_q.weight", config.n_embd_q(), n_embd);
    layer.k = find.matrix(prefix + "attn_k.weight", config.n_embd_kv(), n_embd);
    layer.v = find.matrix(prefix + "attn_v.weight", config.n_embd_kv(), n_embd);
    layer.attn_output = find.matrix(prefix + "attn_output.weight", n_embd, config.n_embd_q());
    layer.q_bias = find.optional_vector(prefix + "attn_q.bias", config.n_embd_q());
    layer.k_bias = find.optional_vector(prefix + "attn_k.bias", config.n_embd_kv());
    layer.v_bias = find.optional_vector(prefix + "attn_v.bias", config.n_embd_kv());
    layer.attn_output_bias = find.optional_vector(prefix + "attn_output.bias", n_embd);
}

void find_ffn(Finder &find, const ModelConfig &config, const std::string &prefix, LayerWeights &layer) {
    layer.ffn_norm = find.vector(prefix + "ffn_norm.weight", config.n_embd);
    layer.gate = find.matrix(prefix + "ffn_gate.weight", config.n_ff, config.n_embd);
    layer.up = find.matrix(prefix + "ffn_up.weight", config.n_ff, config.n_embd);
    if (config.sparse_layout) {
        layer.down_t = find.matrix(prefix + "ffn_down_t.weight", config.n_ff, config.n_embd);
    } else {
        layer.down = find.matrix(prefix + "ffn_down.weight", config.n_embd, config.n_ff);
    }
    if (config.has_predictors) {
        layer.predictor_fc1 = find.matrix(prefix + "fc1.weight", config.n_embd);
        layer.predictor_fc2 = find.matrix(prefix + "fc2.weight", config.n_ff, layer.predictor_fc1.n_rows);
    }
}

std::vector<const Matrix *> matrices(const LayerWeights &layer) {
    std::vector<const Matrix *> all = {
        &layer.q,  &layer.k,    &layer.v,      &layer.attn_output,   &layer.gate,
        &layer.up, &layer.down, &layer.down_t, &layer.predictor_fc1, &layer.predictor_fc2};
    std::erase_if(all, [](const Matrix *matrix) { return matrix->type == nullptr; });
    return all;
}

} // namespace

pi_rows Matrix::rows(uint64_t begin, uint64_t end) const {
    for (const Part &part : parts) {
        if (begin < part.begin || end > part.end)
            continue;
        return {part.data + (begin - part.begin) * row_bytes,
                static_cast<int64_t>(row_bytes),
                static_cast<int64_t>(n_cols),
                nullptr,
                static_cast<int64_t>(end - begin),
                nullptr,
                0};
    }
    throw Error(PI_FAILURE,
                "rows " + std::to_string(begin) + " to " + std::to_string(end) + " lie in no single part");
}

Matrix Matrix::columns(uint64_t begin, uint64_t end) const {
    Matrix cut = *this;
    cut.n_cols = end - begin;
    for (Part &part : cut.parts)
        part.data += type->row_bytes(begin);
    return cut;
}

uint64_t Weights::n_bytes() const {
    uint64_t total =
        embedding.n_bytes() + (head.parts[0].data == embedding.parts[0].data ? 0 : head.n_bytes());
    for (const LayerWeights &layer : layers) {
        for (const Matrix *matrix : matrices(layer))
            total += matrix->n_bytes();
    }
    return total;
}

bool Weights::all_float32() const {
    if (embedding.type->id != PI_TYPE_F32 || head.type->id != PI_TYPE_F32)
        return false;
    for (const LayerWeights &layer : layers) {
        for (const Matrix *matrix : matrices(layer)) {
            const bool predictor = matrix == &layer.predictor_fc1 || matrix == &layer.predictor_fc2;
            if (!predictor && matrix->type->id != PI_TYPE_F32) // predictors only choose neurons
                return false;
        }
    }
    return true;
}

Weights find_weights(const Gguf &file, const ModelConfig &config) {
    Finder find(file);
    Weights weights;
    weights.embedding = find.matrix("token_embd.weight", config.n_vocab, config.n_embd);
    weights.head =
        config.tied_head ? weights.embedding : find.matrix("output.weight", config.n_vocab, config.n_embd);
    weights.output_norm = find.vector("output_norm.weight", config.n_embd);
    weights.rope_factors = find.optional_vector("rope_freqs.weight", config.n_rot / 2);
    for (uint32_t i = 0; i < config.n_layers; ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        LayerWeights layer;
        find_attention(find, config, prefix, layer);
        find_ffn(find, config, prefix, layer);
        weights.layers.push_back(std::move(layer));
    }
    find.require_all_used();
    return weights;
}

} // namespace pi
