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
    {PI_TYPE_Q5_0, "Q5_0", PI_QK, sizeof(pi_block_q5_0), PI_KT_Q5_0, true},
    {PI_TYPE_Q5_1, "Q5_1", PI_QK, sizeof(pi_block_q5_1), PI_KT_Q5_1, true},
    {PI_TYPE_Q2_K, "Q2_K", PI_QK_K, sizeof(pi_block_q2_k), PI_KT_Q2_K, true},
    {PI_TYPE_Q3_K, "Q3_K", PI_QK_K, sizeof(pi_block_q3_k), PI_KT_Q3_K, true},
    {PI_TYPE_Q4_K, "Q4_K", PI_QK_K, sizeof(pi_block_q4_k), PI_KT_Q4_K, true},
    {PI_TYPE_Q5_K, "Q5_K", PI_QK_K, sizeof(pi_block_q5_k), PI_KT_Q5_K, true},
    {PI_TYPE_Q6_K, "Q6_K", PI_QK_K, sizeof(pi_block_q6_k), PI_KT_Q6_K, true},
    {PI_TYPE_IQ4_NL, "IQ4_NL", PI_QK, sizeof(pi_block_iq4_nl), PI_KT_IQ4_NL, true},
    {PI_TYPE_MXFP4, "MXFP4", PI_QK, sizeof(pi_block_mxfp4), PI_KT_MXFP4, true},
    {PI_TYPE_NVFP4, "NVFP4", 64, sizeof(pi_block_nvfp4), PI_KT_NVFP4, false},
};

std::string supported_names() {
    std::string names;
    for (const TypeInfo &type : registry)
        names += (names.empty() ? "" : ", ") + std::string(type.name);
    return names;
}

// Types of other engines, by the names their users know them by.
constexpr struct {
    uint32_t id;
    const char *name;
} foreign_types[] = {
    {4, "Q4_2"},      {5, "Q4_3"},      {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"},    {17, "IQ2_XS"},
    {18, "IQ3_XXS"},  {19, "IQ1_S"},    {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"},     {24, "I8"},
    {25, "I16"},      {26, "I32"},      {27, "I64"},   {28, "F64"},   {29, "IQ1_M"},      {31, "Q4_0_4_4"},
    {32, "Q4_0_4_8"}, {33, "Q4_0_8_8"}, {34, "TQ1_0"}, {35, "TQ2_0"}, {36, "IQ4_NL_4_4"}, {41, "Q1_0"},
};

std::string name_of_unsupported(uint32_t id) {
    for (const auto &type : foreign_types) {
        if (type.id == id)
            return "type " + std::string(type.name);
    }
    return "type id " + std::to_string(id);
}

} // namespace

const TypeInfo &type_info(uint32_t id, std::string_view tensor) {
    for (const TypeInfo &type : registry) {
        if (type.id == id)
            return type;
    }
    const std::string where = tensor.empty() ? "" : "tensor " + std::string(tensor) + ": ";
    throw Error(PI_FAILURE, where + name_of_unsupported(id) + " is not supported",
                "supported types: " + supported_names() + "; convert or quantise the model to one of them");
}

} // namespace pi
