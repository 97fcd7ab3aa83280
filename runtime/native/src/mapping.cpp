#include "mapping.h"

#include "status.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace pi {
namespace {

struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0)
            close(fd);
    }
};

[[noreturn]] void throw_unreadable(const std::string &path, const std::string &why) {
    throw Error(PI_FAILURE, "cannot read model " + path + ": " + why, "check the path given with -m");
}

size_t checked_size(const std::string &path, int fd) {
    struct stat info{};
    if (fstat(fd, &info) != 0)
        throw_unreadable(path, std::strerror(errno));
    if (S_ISDIR(info.st_mode))
        throw_unreadable(path, "it is a directory");
    if (!S_ISREG(info.st_mode))
        throw_unreadable(path, "it is not a regular file");
    if (info.st_size == 0)
        throw_unreadable(path, "it is empty");
    return static_cast<size_t>(info.st_size);
}

} // namespace

Mapping::Mapping(const std::string &path) : path_(path) {
    const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    if (file.fd < 0)
        throw_unreadable(path, std::strerror(errno));
    size_ = checked_size(path, file.fd);
    void *address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
    if (address == MAP_FAILED)
        throw_unreadable(path, std::strerror(errno));
    data_ = static_cast<const uint8_t *>(address);
}

Mapping::~Mapping() {
    munmap(const_cast<uint8_t *>(data_), size_);
}

} // namespace pi
