// many_q8.inl: what products of many tokens' int8 activations share. The including file defines many_q8.

#pragma once

namespace {

// Blocks of 32 have one scale, K-quants one for each sub-block.
template <typename Type>
concept KQuant = requires { Type::sub_elements; };

template <typename Type>
constexpr int64_t elements_of = PI_QK;
template <KQuant Type>
constexpr int64_t elements_of<Type> = PI_QK_K;
template <typename Type>
constexpr int64_t sub_elements_of = PI_QK;
template <KQuant Type>
constexpr int64_t sub_elements_of<Type> = Type::sub_elements;

// Tokens of one slice of columns: q and d of the first, and how far the next token's are.
struct TokenSlice {
    const int8_t *q;
    const float *d;
    const float *s; // sums of sub-blocks
    int64_t q_stride, d_stride, s_stride;
};

template <typename Type>
TokenSlice token_slice(const pi_q8_vector *x, int64_t n_cols, int64_t token, int64_t column) {
    const int64_t q = token * n_cols + column;
    const bool halves = sub_elements_of<Type> == PI_QK / 2;
    return {x->q + q, x->d + q / PI_QK, halves ? x->h + q / (PI_QK / 2) : x->s + q / PI_QK,
            n_cols,   n_cols / PI_QK,   n_cols / sub_elements_of<Type>};
}

// As pi_type_kernels has it.
template <typename Type>
void many_q8(const pi_rows *w, const pi_q8_vector *x, int64_t n_tokens, float *out, int64_t out_stride);

constexpr pi_kernels with_many_q8(pi_kernels table) {
    table.type[PI_KT_Q8_0].many_q8 = many_q8<Q8_0>;
    table.type[PI_KT_Q4_0].many_q8 = many_q8<Q4_0>;
    table.type[PI_KT_Q4_1].many_q8 = many_q8<Q4_1>;
    table.type[PI_KT_Q5_0].many_q8 = many_q8<Q5_0>;
    table.type[PI_KT_Q5_1].many_q8 = many_q8<Q5_1>;
    table.type[PI_KT_Q2_K].many_q8 = many_q8<Q2_K>;
    table.type[PI_KT_Q3_K].many_q8 = many_q8<Q3_K>;
    table.type[PI_KT_Q4_K].many_q8 = many_q8<Q4_K>;
    table.type[PI_KT_Q5_K].many_q8 = many_q8<Q5_K>;
    table.type[PI_KT_Q6_K].many_q8 = many_q8<Q6_K>;
    table.type[PI_KT_IQ4_NL].many_q8 = many_q8<IQ4_NL>;
    table.type[PI_KT_MXFP4].many_q8 = many_q8<MXFP4>;
    return table;
}

} // namespace
