// model.h: an open model file: its bytes, metadata, configuration and weights. Immutable once open, so that
// any number of engines and threads may share it.
#pragma once

#include "gguf.h"
#include "mapping.h"
#include "weights.h"

struct pi_model {
    explicit pi_model(const std::string &path)
        : mapping(path), file(mapping.bytes()), config(pi::read_config(file)),
          weights(pi::find_weights(file, config)) {
        mapping.require_unchanged(); // what was checked is what is there
    }

    const pi::Mapping mapping;
    const pi::Gguf file;
    const pi::ModelConfig config;
    const pi::Weights weights;
};
