#include "mapping.h"

#include "status.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace pi {
namespace {

// ---- maps whose lost pages are replaced
// --------------------------------------------------------------------------

// Read by the signal handler, so only atomics; a slot is free when `begin` is 0.
struct GuardedMap {
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};
    std::atomic<bool> lost_pages{false};
};

std::array<GuardedMap, 1024> guarded_maps;
std::mutex guard_mutex;
struct sigaction previous_action{};
std::once_flag handler_installed;

GuardedMap *find_map(uintptr_t address) {
    for (GuardedMap &map : guarded_maps) {
        if (address >= map.begin.load() && address < map.end.load())
            return &map;
    }
    return nullptr;
}

void pass_on(int signal, siginfo_t *info, void *context) {
    if ((previous_action.sa_flags & SA_SIGINFO) != 0)
        return previous_action.sa_sigaction(signal, info, context);
    if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN)
        return previous_action.sa_handler(signal);
    sigaction(signal, &previous_action, nullptr); // the access repeats and takes its default course
}

void on_bus_error(int signal, siginfo_t *info, void *context) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    GuardedMap *map = find_map(address);
    if (map == nullptr)
        return pass_on(signal, info, context);
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void *page = reinterpret_cast<void *>(address / page_bytes * page_bytes);
    if (mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return pass_on(signal, info, context);
    map->lost_pages = true;
}

void install_handler() {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGBUS, &action, &previous_action);
}

size_t guard(const uint8_t *data, size_t size) {
    std::call_once(handler_installed, install_handler);
    const std::lock_guard lock(guard_mutex);
    for (size_t slot = 0; slot < guarded_maps.size(); ++slot) {
        GuardedMap &map = guarded_maps[slot];
        if (map.begin.load() != 0)
            continue;
        map.lost_pages = false;
        map.end = reinterpret_cast<uintptr_t>(data) + size;
        map.begin = reinterpret_cast<uintptr_t>(data);
        return slot;
    }
    throw Error(PI_FAILURE, "more than " + std::to_string(guarded_maps.size()) + " model files are open",
                "close some of them");
}

void unguard(size_t slot) {
    const std::lock_guard lock(guard_mutex);
    guarded_maps[slot].end = 0;
    guarded_maps[slot].begin = 0;
}

// ---- opening
// -----------------------------------------------------------------------------------------------------

[[noreturn]] void throw_unreadable(const std::string &path, const std::string &why) {
    throw Error(PI_FAILURE, "cannot read model " + path + ": " + why, "check the path given with -m");
}

int open_file(const std::string &path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO would wait for a writer
    if (fd < 0)
        throw_unreadable(path, std::strerror(errno));
    return fd;
}

struct stat checked_status(const std::string &path, int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0)
        throw_unreadable(path, std::strerror(errno));
    if (S_ISDIR(status.st_mode))
        throw_unreadable(path, "it is a directory");
    if (!S_ISREG(status.st_mode))
        throw_unreadable(path, "it is not a regular file");
    if (status.st_size == 0)
        throw_unreadable(path, "it is empty");
    return status;
}

} // namespace

FileDescriptor::~FileDescriptor() {
    close(fd_);
}

Mapping::Mapping(const std::string &path)
    : path_(path), file_(open_file(path)), opened_(checked_status(path, file_.get())),
      size_(static_cast<size_t>(opened_.st_size)) {
    void *address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file_.get(), 0);
    if (address == MAP_FAILED)
        throw_unreadable(path, std::strerror(errno));
    data_ = static_cast<const uint8_t *>(address);
    madvise(address, size_,
            MADV_HUGEPAGE); // what comes from the disk comes in large pages, where there are any
    try {
        guard_ = guard(data_, size_);
    } catch (...) {
        munmap(address, size_);
        throw;
    }
}

Mapping::~Mapping() {
    unguard(guard_);
    munmap(const_cast<uint8_t *>(data_), size_);
}

void Mapping::drop(const uint8_t *data, size_t n_bytes) const noexcept {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<uintptr_t>(data), last = first + n_bytes;
    const uintptr_t begin = (first + page_bytes - 1) / page_bytes * page_bytes;
    const uintptr_t end = last / page_bytes * page_bytes;
    if (begin < end) // advice only: a page that stays does no harm
        static_cast<void>(madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED));
}

void Mapping::require_unchanged() const {
    struct stat now{};
    const bool same = fstat(file_.get(), &now) == 0 && now.st_size == opened_.st_size &&
                      now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
                      now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec;
    if (!same || guarded_maps[guard_].lost_pages.load())
        throw Error(PI_FAILURE, "the model file " + path_ + " changed while it was in use",
                    "load it again when nothing writes to it");
}

} // namespace pi
