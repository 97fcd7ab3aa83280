// mapping.h: a file mapped read-only for as long as the object lives. A file that shrinks under the map would
// kill the process (SIGBUS); here its lost pages read as zeros and require_unchanged() reports it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <sys/stat.h>

namespace pi {

class FileDescriptor {
  public:
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor();
    FileDescriptor(const FileDescriptor &) = delete;
    FileDescriptor &operator=(const FileDescriptor &) = delete;
    int get() const { return fd_; }

  private:
    int fd_;
};

class Mapping {
  public:
    // Throws Error when the path is no readable, non-empty regular file.
    explicit Mapping(const std::string &path);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    std::span<const uint8_t> bytes() const { return {data_, size_}; }
    // Whole pages among these bytes of it leave the process's memory; they come back when they are read.
    void drop(const uint8_t *data, size_t n_bytes) const noexcept;
    // Throws Error when the file was written to or cut since it was opened.
    void require_unchanged() const;

  private:
    std::string path_;
    FileDescriptor file_;
    struct stat opened_{};
    size_t size_ = 0;
    const uint8_t *data_ = nullptr;
    size_t guard_ = 0; // slot among the guarded maps
};

} // namespace pi
