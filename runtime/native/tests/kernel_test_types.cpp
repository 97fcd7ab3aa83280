// kernel_test_types.cpp: rows of every tensor type: as floats, times a vector, times int8 activations, added
// up.
#include "kernel_test.h"

#include "pi.h"
#include "src/types.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pi::test {
namespace {

using Bytes = Guarded<uint8_t>;

// Where a block has its float16 scales, so that random bytes can be given finite ones, and where its quants.
struct Layout {
    uint32_t id;
    std::vector<size_t> halves;
    size_t quants_begin, quants_end;
    bool has_low; // a quant of 0 is worth something else
};

const Layout layouts[] = {
    {PI_TYPE_F32, {}, 0, 0, false},         {PI_TYPE_F16, {}, 0, 0, false},
    {PI_TYPE_BF16, {}, 0, 0, false},        {PI_TYPE_Q8_0, {0}, 2, 34, false},
    {PI_TYPE_Q4_0, {0}, 2, 18, true},       {PI_TYPE_Q4_1, {0, 2}, 4, 20, true},
    {PI_TYPE_Q5_0, {0}, 2, 22, true},       {PI_TYPE_Q5_1, {0, 2}, 4, 24, true},
    {PI_TYPE_Q2_K, {80, 82}, 16, 80, true}, {PI_TYPE_Q3_K, {108}, 0, 96, true},
    {PI_TYPE_Q4_K, {0, 2}, 16, 144, true},  {PI_TYPE_Q5_K, {0, 2}, 16, 176, true},
    {PI_TYPE_Q6_K, {208}, 0, 192, true},    {PI_TYPE_IQ4_NL, {0}, 2, 18, false},
    {PI_TYPE_MXFP4, {}, 1, 17, false},      {PI_TYPE_NVFP4, {}, 4, 36, false},
};

bool is_float(const TypeInfo &type) {
    return type.block_elements == 1;
}

// Rows with the values that the reference reads in them, and those that it would read if every quant were 0.
struct Matrix {
    const TypeInfo &type;
    int64_t n_rows, n_cols;
    Bytes data;
    Floats values, lows;

    int64_t row_bytes() const { return static_cast<int64_t>(type.row_bytes(static_cast<uint64_t>(n_cols))); }
    pi_rows rows(const std::vector<int32_t> *index = nullptr) const {
        return {data.data(),
                row_bytes(),
                n_cols,
                index != nullptr ? index->data() : nullptr,
                index != nullptr ? static_cast<int64_t>(index->size()) : n_rows,
                nullptr,
                0};
    }
};

Floats dequantised(const TypeInfo &type, const Bytes &data, int64_t n) {
    Floats values(size_of(n));
    pi_kernels_scalar.type[type.kernel_index].dequantize(data.data(), 0, n, values.data());
    return values;
}

Bytes float_rows(const TypeInfo &type, int64_t n, unsigned seed) {
    const Floats x = normal(n, seed);
    Bytes data(size_of(n) * type.block_bytes);
    for (size_t i = 0; i < x.size(); ++i) {
        const uint32_t bits = bits_of(x[i]);
        const auto upper = static_cast<uint16_t>(bits >> 16);
        pi_half half;
        pi_kernels_scalar.to_half(&x[i], 1, &half);
        const void *from = type.id == PI_TYPE_F32   ? static_cast<const void *>(&bits)
                           : type.id == PI_TYPE_F16 ? static_cast<const void *>(&half)
                                                    : &upper;
        std::memcpy(data.data() + i * type.block_bytes, from, type.block_bytes);
    }
    return data;
}

// Every quant and packed scale among them; float16 scales near 1.
Bytes block_rows(const TypeInfo &type, const Layout &layout, int64_t n, unsigned seed) {
    std::mt19937 random(seed);
    Bytes data(size_of(n) / type.block_elements * type.block_bytes);
    for (uint8_t &byte : data)
        byte = static_cast<uint8_t>(random());
    for (size_t block = 0; block < data.size(); block += type.block_bytes) {
        for (const size_t offset : layout.halves) {
            const Floats scale = normal(1, static_cast<unsigned>(random()));
            pi_half half;
            pi_kernels_scalar.to_half(scale.data(), 1, &half);
            std::memcpy(&data[block + offset], &half, sizeof half);
        }
        if (type.id == PI_TYPE_MXFP4)
            data[block] = static_cast<uint8_t>(block == 0 ? 0 : 100 + random() % 50);
    }
    return data;
}

Matrix with_data(const TypeInfo &type, const Layout &layout, int64_t n_rows, int64_t n_cols, Bytes data) {
    const int64_t n = n_rows * n_cols;
    Floats values = dequantised(type, data, n), lows(size_of(n));
    if (layout.has_low) {
        Bytes zeros = data;
        for (size_t block = 0; block < zeros.size(); block += type.block_bytes)
            std::fill(&zeros[block + layout.quants_begin], &zeros[block] + layout.quants_end, uint8_t{0});
        lows = dequantised(type, zeros, n);
    }
    return {type, n_rows, n_cols, std::move(data), std::move(values), std::move(lows)};
}

Matrix random_matrix(const Layout &layout, int64_t n_rows, int64_t n_cols, unsigned seed) {
    const TypeInfo &type = type_info(layout.id);
    const int64_t n = n_rows * n_cols;
    return with_data(type, layout, n_rows, n_cols,
                     is_float(type) ? float_rows(type, n, seed) : block_rows(type, layout, n, seed));
}

// Owns what a pi_q8_vector points to.
struct Int8Vector {
    Guarded<int8_t> q;
    Floats d, s, h;

    explicit Int8Vector(const Floats &x) : q(x.size()), d(x.size() / PI_QK), s(d.size()), h(2 * d.size()) {
        const pi_q8_vector out = view();
        pi_kernels_scalar.quantize_q8(x.data(), static_cast<int64_t>(x.size()), &out);
    }
    pi_q8_vector view() { return {q.data(), d.data(), s.data(), h.data()}; }
    double value(size_t i) const { return static_cast<double>(d[i / PI_QK]) * q[i]; }
};

void test_dequantize(const pi_type_kernels &kernels, const Matrix &w, const std::string &what) {
    const int64_t block = w.type.block_elements, n = w.n_cols;
    const int64_t step = block == 1 ? PI_QK : block; // where a part may begin
    for (const int64_t begin : {int64_t{0}, n / 2 / step * step}) {
        for (const int64_t size : {int64_t{0}, std::min<int64_t>(37, n - begin), n - begin}) {
            Floats got(size_of(size));
            kernels.dequantize(w.data.data(), begin, size, got.data());
            expect_equal(got.data(), w.values.data() + begin, size, what + " dequantize");
        }
    }
}

void test_dot_f32(const pi_type_kernels &kernels, const Matrix &w, const std::string &what) {
    const Floats x = normal(w.n_cols, 1);
    Floats got(size_of(w.n_rows));
    const pi_rows rows = w.rows();
    kernels.dot_f32(&rows, x.data(), got.data());
    Doubles want(got.size()), bound(got.size());
    for (size_t i = 0; i < w.values.size(); ++i) {
        const double term = static_cast<double>(w.values[i]) * x[i % x.size()];
        want[i / x.size()] += term;
        bound[i / x.size()] += static_cast<double>(w.n_cols + 2) * u * std::abs(term);
    }
    expect_within(got, want, bound, what + " dot_f32");
}

// The products of w with tokens' rounded activations, and the sums of their parts' magnitudes: a value is
// (value - low) + low in a kernel, and where quants are moved to be unsigned, low is up to 128 of their
// steps.
void int8_products(const Matrix &w, const Int8Vector &x, int64_t n_tokens, double moved, Doubles *want,
                   Doubles *magnitude) {
    const size_t n_cols = size_of(w.n_cols), n_rows = size_of(w.n_rows);
    for (size_t t = 0; t < size_of(n_tokens); ++t) {
        for (size_t r = 0; r < n_rows; ++r) {
            double sum = 0, parts = 0;
            for (size_t i = 0; i < n_cols; ++i) {
                const double value = w.values[r * n_cols + i], low = w.lows[r * n_cols + i] + moved;
                const double activation = x.value(t * n_cols + i);
                sum += value * activation;
                parts += (std::abs(value - low) + std::abs(low)) * std::abs(activation);
            }
            want->push_back(sum);
            magnitude->push_back(parts);
        }
    }
}

// Integers are exact; scaling and the sums over sub-blocks of 16 or 32 round, some 8 operations besides the
// sum. The reference adds up element by element.
Doubles int8_bound(const Doubles &magnitude, const Matrix &w, bool by_element) {
    const double terms = static_cast<double>(by_element ? w.n_cols : w.n_cols / 16) + 8;
    Doubles bound;
    for (const double parts : magnitude)
        bound.push_back(terms * u * parts);
    return bound;
}

void test_dot_q8(const pi_type_kernels &kernels, const Matrix &w, const Floats &activations,
                 const std::string &what) {
    Int8Vector x(activations);
    const pi_q8_vector view = x.view();
    const pi_rows rows = w.rows();
    Floats got(size_of(w.n_rows));
    kernels.dot_q8(&rows, &view, got.data());
    Doubles want, magnitude;
    int8_products(w, x, 1, 0, &want, &magnitude);
    const bool by_element = kernels.dot_q8 == pi_kernels_scalar.type[w.type.kernel_index].dot_q8;
    expect_within(got, want, int8_bound(magnitude, w, by_element), what + " dot_q8");
}

// [n_tokens, n_rows] of rows and tokens from the given ones on
Floats multiplied(const pi_type_kernels &kernels, const Matrix &w, Int8Vector *x, int64_t row, int64_t n_rows,
                  int64_t token, int64_t n_tokens, const std::string &what) {
    const int64_t stride = n_rows + 2, at = token * w.n_cols, block = at / PI_QK;
    const pi_q8_vector tokens = {&x->q[size_of(at)], &x->d[size_of(block)], &x->s[size_of(block)],
                                 &x->h[size_of(2 * block)]};
    pi_rows rows = w.rows();
    rows.base = w.data.data() + row * w.row_bytes();
    rows.n_rows = n_rows;
    Floats strided(size_of(n_tokens * stride), 0.5f), out;
    kernels.many_q8(&rows, &tokens, n_tokens, strided.data(), stride);
    for (auto at_row = strided.begin(); at_row != strided.end(); at_row += stride) {
        out.insert(out.end(), at_row, at_row + n_rows);
        expect(at_row[n_rows] == 0.5f && at_row[n_rows + 1] == 0.5f, what + " many_q8 beyond its rows");
    }
    return out;
}

// More rows and tokens than a tile of either has; none depends on its neighbours.
void test_many_q8(const pi_type_kernels &kernels, const Layout &layout, int64_t n_cols,
                  const std::string &what) {
    const int64_t n_rows = 75, n_tokens = 13;
    const Matrix w = random_matrix(layout, n_rows, n_cols, 7);
    Int8Vector x(normal(n_tokens * n_cols, 8));
    const Floats got = multiplied(kernels, w, &x, 0, n_rows, 0, n_tokens, what);
    const Floats part = multiplied(kernels, w, &x, 30, 11, 3, 6, what);
    for (int64_t t = 0; t < 6; ++t) {
        expect_equal(&part[size_of(t * 11)], &got[size_of((3 + t) * n_rows + 30)], 11,
                     what + " many_q8 of a part");
    }
    double largest = 0; // at least 12 steps of its block
    for (const float value : w.values)
        largest = std::max(largest, std::abs(static_cast<double>(value)));
    Doubles want, magnitude;
    int8_products(w, x, n_tokens, layout.has_low ? 0 : 128.0 / 12 * largest, &want, &magnitude);
    expect_within(got, want, int8_bound(magnitude, w, false), what + " many_q8");
}

void test_axpy(const pi_type_kernels &kernels, const Matrix &w, const std::string &what) {
    const Floats coef = normal(w.n_rows, 2);
    Floats y = normal(w.n_cols, 3);
    Doubles want(y.begin(), y.end()), bound(y.size());
    for (size_t c = 0; c < y.size(); ++c) {
        double magnitude = std::abs(want[c]);
        for (size_t r = 0; r < coef.size(); ++r) {
            const double term = static_cast<double>(coef[r]) * w.values[r * y.size() + c];
            want[c] += term;
            magnitude += std::abs(term);
        }
        bound[c] = static_cast<double>(w.n_rows + 2) * u * magnitude;
    }
    const pi_rows rows = w.rows();
    kernels.axpy(&rows, coef.data(), 0, w.n_cols, y.data());
    expect_within(y, want, bound, what + " axpy");
}

// A row's bits do not depend on its neighbours: gathering changes none.
void test_gather(const pi_type_kernels &kernels, const Matrix &w, const std::string &what) {
    const Floats x = normal(w.n_cols, 4);
    Int8Vector quantised(x);
    const pi_q8_vector view = quantised.view();
    std::vector<int32_t> index(size_of(w.n_rows / 2 + 1));
    std::iota(index.rbegin(), index.rend(), 0);
    const pi_rows all = w.rows(), some = w.rows(&index);
    for (const bool int8 : {false, true}) {
        if (int8 && kernels.dot_q8 == nullptr)
            continue;
        Floats whole(size_of(w.n_rows)), part(index.size());
        if (int8) {
            kernels.dot_q8(&all, &view, whole.data());
            kernels.dot_q8(&some, &view, part.data());
        } else {
            kernels.dot_f32(&all, x.data(), whole.data());
            kernels.dot_f32(&some, x.data(), part.data());
        }
        for (size_t i = 0; i < index.size(); ++i) {
            expect_equal(&part[i], &whole[size_of(index[i])], 1,
                         what + (int8 ? " dot_q8" : " dot_f32") + " gathered");
        }
    }
}

// The order of rows alone decides: column ranges, gathering, coefficients of 0 and what comes next change no
// bit.
void test_axpy_parts(const pi_type_kernels &kernels, const Matrix &w, const std::string &what) {
    Floats coef = normal(w.n_rows, 5), active_coef;
    std::vector<int32_t> active;
    for (size_t r = 0; r < coef.size(); ++r) {
        if (r % 5 < 3) {
            coef[r] = 0;
            continue;
        }
        active.push_back(static_cast<int32_t>(r));
        active_coef.push_back(coef[r]);
    }
    const Floats y = normal(w.n_cols, 6);
    Floats whole = y, gathered = y, parts = y;
    const pi_rows all = w.rows();
    pi_rows some = w.rows(&active);
    some.ahead = active.data();
    some.n_ahead = w.n_rows / 100;
    kernels.axpy(&all, coef.data(), 0, w.n_cols, whole.data());
    kernels.axpy(&some, active_coef.data(), 0, w.n_cols, gathered.data());
    const int64_t step = std::max<int64_t>(PI_QK, w.type.block_elements);
    for (int64_t begin = 0; begin < w.n_cols; begin += step)
        kernels.axpy(&all, coef.data(), begin, std::min(step, w.n_cols - begin), parts.data() + begin);
    expect_equal(gathered.data(), whole.data(), w.n_cols, what + " axpy gathered");
    expect_equal(parts.data(), whole.data(), w.n_cols, what + " axpy by columns");
}

// Not even infinity times 0 leaves a trace.
void test_axpy_of_zeros(const pi_kernels &table) {
    const int64_t n_rows = 6, n = 67;
    const Floats infinite(size_of(n_rows * n), std::numeric_limits<float>::infinity());
    const Floats zeros = {0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f};
    Floats y(size_of(n), -0.0f);
    const Floats before = y;
    const pi_rows rows = {
        infinite.data(), n * static_cast<int64_t>(sizeof(float)), n, nullptr, n_rows, nullptr, 0};
    table.type[PI_KT_F32].axpy(&rows, zeros.data(), 0, n, y.data());
    expect_equal(y.data(), before.data(), n, std::string(table.name) + " axpy of zeros");
}

// The largest quants of either sign against the largest activations of one sign overflow nowhere.
void test_extremes(const pi_type_kernels &kernels, const Layout &layout, const std::string &what) {
    const Matrix random = random_matrix(layout, 5, 512, 9);
    for (const uint8_t byte : {0x00, 0x7f, 0x80, 0xff}) {
        Bytes data = random.data;
        for (size_t block = 0; block < data.size(); block += random.type.block_bytes)
            std::fill(&data[block + layout.quants_begin], &data[block] + layout.quants_end, byte);
        const Matrix w = with_data(random.type, layout, random.n_rows, random.n_cols, std::move(data));
        for (const float sign : {1.0f, -1.0f})
            test_dot_q8(kernels, w, Floats(size_of(w.n_cols), sign), what + " extremes");
    }
}

// Row lengths in blocks (in elements for plain numbers): one, few, more than are fetched ahead.
std::vector<int64_t> widths(const TypeInfo &type) {
    if (is_float(type))
        return {1, 7, 33, 64, 576, 1001, 2100};
    const int64_t block = type.block_elements;
    return {block, 3 * block, 576 / block * block + block, 4608 / block * block};
}

} // namespace

void test_types(const pi_kernels &table) {
    for (const Layout &layout : layouts) {
        const TypeInfo &type = type_info(layout.id);
        const pi_type_kernels &kernels = table.type[type.kernel_index];
        const std::string what = std::string(table.name) + " " + type.name;
        expect((kernels.dot_q8 != nullptr) == type.int8_activations,
               what + ": dot_q8 and the registry differ");
        for (const int64_t n : widths(type)) {
            const Matrix w = random_matrix(layout, 9, n, static_cast<unsigned>(n));
            const std::string sized = what + " of " + std::to_string(n);
            test_dequantize(kernels, w, sized);
            test_dot_f32(kernels, w, sized);
            test_axpy(kernels, w, sized);
            if (kernels.dot_q8 != nullptr)
                test_dot_q8(kernels, w, normal(n, 1), sized);
            if (kernels.many_q8 != nullptr && n < 1000)
                test_many_q8(kernels, layout, n, sized);
        }
        if (kernels.dot_q8 != nullptr)
            test_extremes(kernels, layout, what);
        const Matrix tall = random_matrix(layout, 700, type.block_elements == 1 ? 70 : PI_QK_K, 1);
        test_gather(kernels, tall, what);
        test_axpy_parts(kernels, tall, what);
    }
    test_axpy_of_zeros(table);
}

} // namespace pi::test
