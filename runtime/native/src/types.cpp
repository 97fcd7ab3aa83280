#include "types.h"

#include "kernels/kernels.h"
#include "pi.h"
#include "status.h"

namespace pi {
namespace {

constexpr TypeInfo registry[] = {
    {PI_TYPE_F32, "F32", 1, sizeof(float), PI_KT_F32, false},
    {PI_TYPE_F16, "F16", 1, sizeof(pi_half), PI_KT_F16, false},
    {PI_TYPE_BF16, "BF16", 1, sizeof(pi_bf16), PI_KT_BF16, false},
    {PI_TYPE_Q8_0, "Q8_0", PI_QK, sizeof(pi_block_q8_0), PI_KT_Q8_0, true},
    {PI_TYPE_Q4_0, "Q4_0", PI_QK, sizeof(pi_block_q4_0), PI_KT_Q4_0, true},
    {PI_TYPE_Q4_1, "Q4_1", PI_QK, sizeof(pi_block_q4_1), PI_KT_Q4_1, true},
};

std::string supported_names() {
    std::string names;
    for (const TypeInfo &type : registry)
        names += (names.empty() ? "" : ", ") + std::string(type.name);
    return names;
}

} // namespace

const TypeInfo &type_info(uint32_t id, std::string_view tensor) {
    for (const TypeInfo &type : registry) {
        if (type.id == id)
            return type;
    }
    const std::string where = tensor.empty() ? "" : "tensor " + std::string(tensor) + ": ";
    throw Error(PI_FAILURE, where + "type id " + std::to_string(id) + " is not supported",
                "supported types: " + supported_names());
}

} // namespace pi
