#include "gguf.h"

#include "status.h"
#include "types.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace pi {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF values are read in place, little endian");

constexpr uint64_t max_dims = 4;
constexpr uint64_t max_name_bytes = 256;
constexpr uint64_t default_alignment = 32;
constexpr uint64_t max_alignment = 1 << 20;

template <typename T>
T load(const uint8_t *data) {
    T value;
    std::memcpy(&value, data, sizeof(T));
    return value;
}

bool is_control(char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
}

} // namespace

// A cursor that cannot leave the file.
class Reader {
  public:
    explicit Reader(std::span<const uint8_t> file) : file_(file) {}

    std::span<const uint8_t> take(uint64_t n_bytes) {
        if (n_bytes > file_.size() - position_)
            throw_bad_file("the model file is truncated in its header");
        const auto view = file_.subspan(position_, n_bytes);
        position_ += n_bytes;
        return view;
    }
    template <typename T>
    T number() {
        return load<T>(take(sizeof(T)).data());
    }
    std::span<const uint8_t> string() { return take(number<uint64_t>()); }
    std::string name(const char *what) {
        const auto view = string();
        if (view.empty() || view.size() > max_name_bytes)
            throw_bad_file(std::string(what) + " of bad length");
        std::string name(reinterpret_cast<const char *>(view.data()), view.size());
        if (std::any_of(name.begin(), name.end(), is_control))
            throw_bad_file(std::string(what) + " with control characters");
        return name;
    }
    uint64_t position() const { return position_; }
    uint64_t remaining() const { return file_.size() - position_; }

  private:
    std::span<const uint8_t> file_;
    uint64_t position_ = 0;
};

namespace {

uint64_t scalar_bytes(ValueType type) {
    switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean:
        return 1;
    case ValueType::u16:
    case ValueType::i16:
        return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32:
        return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64:
        return 8;
    default:
        throw_bad_file("unknown metadata value type " + std::to_string(static_cast<uint32_t>(type)));
    }
}

Value read_array(Reader &reader) {
    const auto element = static_cast<ValueType>(reader.number<uint32_t>());
    const auto count = reader.number<uint64_t>();
    Value value{ValueType::array, element, count, {}};
    if (element != ValueType::string) {
        const uint64_t width = scalar_bytes(element); // arrays of arrays end here
        if (count > reader.remaining() / width)
            throw_bad_file("the model file is truncated: a metadata array ends beyond it");
        value.bytes = reader.take(count * width);
        return value;
    }
    Reader ahead = reader;
    if (count > reader.remaining() / sizeof(uint64_t))
        throw_bad_file("the model file is truncated: a metadata array ends beyond it");
    for (uint64_t i = 0; i < count; ++i)
        ahead.string();
    value.bytes = reader.take(ahead.position() - reader.position());
    return value;
}

Value read_value(Reader &reader) {
    const auto type = static_cast<ValueType>(reader.number<uint32_t>());
    if (type == ValueType::array)
        return read_array(reader);
    if (type == ValueType::string)
        return {type, type, 1, reader.string()};
    return {type, type, 1, reader.take(scalar_bytes(type))};
}

uint64_t checked_bytes(const TensorView &tensor) {
    const TypeInfo &type = type_info(tensor.type, tensor.name);
    if (tensor.shape[0] % type.block_elements != 0)
        throw_bad_file("tensor " + tensor.name + ": rows of " + std::to_string(tensor.shape[0]) +
                       " elements are no whole number of " + type.name + " blocks");
    uint64_t n_bytes = tensor.shape[0] / type.block_elements;
    uint64_t factor = type.block_bytes;
    for (size_t i = 0; i <= tensor.shape.size(); ++i) {
        if (factor == 0 || n_bytes > UINT64_MAX / factor)
            throw_bad_file("tensor " + tensor.name + " has a bad shape");
        n_bytes *= factor;
        factor = tensor.dim(i + 1);
    }
    if (n_bytes == 0)
        throw_bad_file("tensor " + tensor.name + " is empty");
    return n_bytes;
}

TensorView read_tensor(Reader &reader) {
    TensorView tensor{};
    tensor.name = reader.name("a tensor name");
    const auto n_dims = reader.number<uint32_t>();
    if (n_dims == 0 || n_dims > max_dims)
        throw_bad_file("tensor " + tensor.name + " has a bad rank");
    for (uint32_t i = 0; i < n_dims; ++i)
        tensor.shape.push_back(reader.number<uint64_t>());
    tensor.type = reader.number<uint32_t>();
    tensor.offset = reader.number<uint64_t>();
    return tensor;
}

[[noreturn]] void throw_bad_value(std::string_view key, const char *wanted) {
    throw_bad_file("metadata key " + std::string(key) + " is not " + wanted);
}

int64_t integer(std::string_view key, const Value &value) {
    const uint8_t *data = value.bytes.data();
    switch (value.type) {
    case ValueType::u8:
    case ValueType::boolean:
        return load<uint8_t>(data);
    case ValueType::i8:
        return load<int8_t>(data);
    case ValueType::u16:
        return load<uint16_t>(data);
    case ValueType::i16:
        return load<int16_t>(data);
    case ValueType::u32:
        return load<uint32_t>(data);
    case ValueType::i32:
        return load<int32_t>(data);
    case ValueType::u64:
    case ValueType::i64:
        return load<int64_t>(data);
    default:
        throw_bad_value(key, "an integer");
    }
}

// Versions from 1 on are small numbers; the other byte order shows them in the upper half.
void check_version(uint32_t version) {
    if (version == 2 || version == 3)
        return;
    if (version != 0 && version % (1u << 16) == 0)
        throw Error(PI_FAILURE, "the GGUF file is big-endian, which is not supported",
                    "convert it for a little-endian machine");
    throw Error(PI_FAILURE, "GGUF version " + std::to_string(version) + " is not supported",
                "supported: 2 and 3; convert the model with a newer converter");
}

} // namespace

Gguf::Gguf(std::span<const uint8_t> file) {
    Reader reader(file);
    read_header(reader);
    place_tensors(file, reader.position());
}

void Gguf::read_header(Reader &reader) {
    const auto magic = reader.take(4);
    powerinfer_magic_ = std::memcmp(magic.data(), "PWRI", 4) == 0;
    if (!powerinfer_magic_ && std::memcmp(magic.data(), "GGUF", 4) != 0)
        throw_bad_file("this is no GGUF file: it starts with neither GGUF nor PWRI");
    check_version(reader.number<uint32_t>());
    const auto n_tensors = reader.number<uint64_t>();
    const auto n_keys = reader.number<uint64_t>();
    for (uint64_t i = 0; i < n_keys; ++i) {
        std::string name = reader.name("a metadata key");
        const Value value = read_value(reader);
        if (!key_index_.emplace(name, keys_.size()).second)
            throw_bad_file("metadata key " + name + " appears twice");
        keys_.emplace_back(std::move(name), value);
    }
    for (uint64_t i = 0; i < n_tensors; ++i) {
        tensors_.push_back(read_tensor(reader));
        if (!tensor_index_.emplace(tensors_.back().name, i).second)
            throw_bad_file("tensor " + tensors_.back().name + " appears twice");
    }
}

void Gguf::place_tensors(std::span<const uint8_t> file, uint64_t header_bytes) {
    const uint64_t alignment = get_u32("general.alignment").value_or(default_alignment);
    if (alignment < 8 || alignment > max_alignment || !std::has_single_bit(alignment))
        throw_bad_file("general.alignment is " + std::to_string(alignment) +
                       ", not a power of two from 8 to " + std::to_string(max_alignment));
    const uint64_t data_begin = (header_bytes + alignment - 1) / alignment * alignment;
    const uint64_t data_bytes = file.size() > data_begin ? file.size() - data_begin : 0;
    for (TensorView &tensor : tensors_) {
        const uint64_t n_bytes = checked_bytes(tensor);
        if (tensor.offset % alignment != 0)
            throw_bad_file("tensor " + tensor.name + " is not aligned");
        if (tensor.offset > data_bytes || n_bytes > data_bytes - tensor.offset)
            throw_bad_file("the model file is truncated: tensor " + tensor.name + " ends beyond it");
        tensor.bytes = file.subspan(data_begin + tensor.offset, n_bytes);
    }
}

const Value *Gguf::find(std::string_view key) const {
    const auto found = key_index_.find(key);
    return found == key_index_.end() ? nullptr : &keys_[found->second].second;
}

const TensorView *Gguf::find_tensor(std::string_view name) const {
    const auto found = tensor_index_.find(name);
    return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

std::optional<uint32_t> Gguf::get_u32(std::string_view key) const {
    const Value *value = find(key);
    if (value == nullptr)
        return std::nullopt;
    const int64_t number = integer(key, *value);
    if (number < 0 || number > UINT32_MAX)
        throw_bad_value(key, "in the range of an unsigned 32-bit integer");
    return static_cast<uint32_t>(number);
}

std::optional<float> Gguf::get_f32(std::string_view key) const {
    const Value *value = find(key);
    if (value == nullptr)
        return std::nullopt;
    double number = 0;
    if (value->type == ValueType::f32) {
        number = static_cast<double>(load<float>(value->bytes.data()));
    } else if (value->type == ValueType::f64) {
        number = load<double>(value->bytes.data());
    } else {
        throw_bad_value(key, "a floating-point number");
    }
    if (std::isnan(number) || (std::isfinite(number) && std::abs(number) > std::numeric_limits<float>::max()))
        throw_bad_value(key, "a single-precision number");
    return static_cast<float>(number);
}

std::optional<std::string> Gguf::get_string(std::string_view key) const {
    const Value *value = find(key);
    if (value == nullptr)
        return std::nullopt;
    if (value->type != ValueType::string)
        throw_bad_value(key, "a string");
    return std::string(reinterpret_cast<const char *>(value->bytes.data()), value->bytes.size());
}

} // namespace pi
