// mapping.h: a file mapped read-only for as long as the object lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pi {

class Mapping {
  public:
    // Throws Error when the path is no readable, non-empty regular file.
    explicit Mapping(const std::string &path);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    std::span<const uint8_t> bytes() const { return {data_, size_}; }
    const std::string &path() const { return path_; }

  private:
    std::string path_;
    const uint8_t *data_ = nullptr;
    size_t size_ = 0;
};

} // namespace pi
