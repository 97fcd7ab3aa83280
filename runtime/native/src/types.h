// types.h: the registry of tensor types: block layout and place in the kernel table. A new type is one row in
// types.cpp, one block in kernels/blocks.h and one kernel file.
#pragma once

#include <cstdint>
#include <string_view>

namespace pi {

struct TypeInfo {
    uint32_t id; // GGUF
    const char *name;
    uint32_t block_elements;
    uint32_t block_bytes;
    int kernel_index;      // PI_KT_*
    bool int8_activations; // has a product with int8 activations

    uint64_t row_bytes(uint64_t n_elements) const { return n_elements / block_elements * block_bytes; }
};

// Throws Error when the id is not in the registry; `tensor` names it in the message.
const TypeInfo &type_info(uint32_t id, std::string_view tensor = {});

} // namespace pi
