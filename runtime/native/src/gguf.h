// gguf.h: a bounded reader of GGUF v2 and v3, with either magic. Nothing is copied: names and values are
// views of the bytes given. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pi {

// Value type ids of GGUF metadata.
enum class ValueType : uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12
};

struct Value {
    ValueType type;
    ValueType element_type; // of an array, else type
    uint64_t count;         // elements of an array, else 1
    std::span<const uint8_t> bytes;
};

struct TensorView {
    std::string name;
    uint32_t type;
    std::vector<uint64_t> shape; // contiguous dimension first
    uint64_t offset;             // of the data, from the beginning of the data section
    std::span<const uint8_t> bytes;

    uint64_t dim(size_t i) const { return i < shape.size() ? shape[i] : 1; }
};

class Reader;

class Gguf {
  public:
    // `file` outlives the object. Throws Error (PI_FAILURE) on anything out of bounds or unknown.
    explicit Gguf(std::span<const uint8_t> file);

    bool powerinfer_magic() const { return powerinfer_magic_; }
    const std::deque<std::pair<std::string, Value>> &keys() const { return keys_; }
    const std::deque<TensorView> &tensors() const { return tensors_; }
    const Value *find(std::string_view key) const;
    const TensorView *find_tensor(std::string_view name) const;

    // Typed look-ups: nothing when the key is absent; Error when it has another type or is out of range.
    std::optional<uint32_t> get_u32(std::string_view key) const;
    std::optional<float> get_f32(std::string_view key) const;
    std::optional<std::string> get_string(std::string_view key) const;

  private:
    void read_header(Reader &reader);
    void place_tensors(std::span<const uint8_t> file, uint64_t header_bytes);

    // Counts come from the file, so nothing is sized by them: these containers grow in small pieces, and a
    // tree, unlike a hash table, has no bad case that a stranger could write down.
    bool powerinfer_magic_ = false;
    std::deque<std::pair<std::string, Value>> keys_;
    std::deque<TensorView> tensors_;
    std::map<std::string, size_t, std::less<>> key_index_;
    std::map<std::string, size_t, std::less<>> tensor_index_;
};

} // namespace pi
