// abi_model.cpp: pi.h's functions on open model files.
#include "model.h"
#include "status.h"

namespace {

void describe(const pi::Value &value, pi_value *out) {
    out->type = static_cast<uint32_t>(value.type);
    out->element_type = static_cast<uint32_t>(value.element_type);
    out->count = value.count;
    out->n_bytes = value.bytes.size();
    out->data = value.bytes.data();
}

} // namespace

pi_status pi_model_open(const char *path, pi_model **out) {
    return pi::guarded([&] {
        pi::require(out, "out");
        *out = nullptr;
        *out = new pi_model(&pi::require(path, "path"));
    });
}

void pi_model_close(pi_model *model) {
    delete model;
}

pi_status pi_model_get_config(const pi_model *model, pi_model_config *out) {
    return pi::guarded([&] {
        const pi::ModelConfig &config = pi::require(model, "model").config;
        pi::require_size(pi::require(out, "out"), "config");
        out->n_layers = config.n_layers;
        out->n_embd = config.n_embd;
        out->n_ff = config.n_ff;
        out->n_vocab = config.n_vocab;
        out->n_heads = config.n_heads;
        out->n_kv_heads = config.n_kv_heads;
        out->head_dim = config.head_dim;
        out->n_rot = config.n_rot;
        out->n_ctx_train = config.n_ctx_train;
        out->sliding_window = config.sliding_window;
        out->activation = static_cast<uint32_t>(config.activation);
        out->sparse_layout = config.sparse_layout ? 1 : 0;
        out->has_predictors = config.has_predictors ? 1 : 0;
        out->sink_positions = config.sink_positions;
        out->tied_head = config.tied_head ? 1 : 0;
        out->float32_weights = model->weights.all_float32() ? 1 : 0;
        out->activation_threshold = config.activation_threshold;
        out->sparse_threshold = config.sparse_threshold;
        out->rms_eps = config.rms_eps;
        out->rope_theta = config.rope_theta;
        out->weight_bytes = model->weights.n_bytes();
    });
}

uint64_t pi_model_key_count(const pi_model *model) {
    return model == nullptr ? 0 : model->file.keys().size();
}

pi_status pi_model_key(const pi_model *model, uint64_t index, const char **name, pi_value *out) {
    return pi::guarded([&] {
        const auto &keys = pi::require(model, "model").file.keys();
        pi::require_size(pi::require(out, "out"), "value");
        if (index >= keys.size())
            pi::throw_usage("key index out of range");
        pi::require(name, "name") = keys[index].first.c_str();
        describe(keys[index].second, out);
    });
}

pi_status pi_model_find_key(const pi_model *model, const char *name, pi_value *out) {
    return pi::guarded([&] {
        pi::require_size(pi::require(out, "out"), "value");
        out->data = nullptr;
        const pi::Value *value = pi::require(model, "model").file.find(&pi::require(name, "name"));
        if (value != nullptr)
            describe(*value, out);
    });
}

uint64_t pi_model_tensor_count(const pi_model *model) {
    return model == nullptr ? 0 : model->file.tensors().size();
}

pi_status pi_model_tensor(const pi_model *model, uint64_t index, const char **name, pi_tensor_info *out) {
    return pi::guarded([&] {
        const auto &tensors = pi::require(model, "model").file.tensors();
        pi::require_size(pi::require(out, "out"), "tensor info");
        if (index >= tensors.size())
            pi::throw_usage("tensor index out of range");
        const pi::TensorView &tensor = tensors[index];
        pi::require(name, "name") = tensor.name.c_str();
        out->type = tensor.type;
        out->n_dims = static_cast<uint32_t>(tensor.shape.size());
        for (size_t i = 0; i < 4; ++i)
            out->shape[i] = tensor.dim(i);
        out->n_bytes = tensor.bytes.size();
        out->data = tensor.bytes.data();
    });
}
