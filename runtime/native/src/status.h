// status.h: how native code fails. Inside, functions throw Error; at the C interface guarded() turns every
// exception into a pi_status and the calling thread's message and hint.
#pragma once

#include "pi.h"

#include <exception>
#include <string>
#include <string_view>

namespace pi {

class Error : public std::exception {
  public:
    Error(pi_status with_status, std::string with_message, std::string with_hint = {})
        : status(with_status), message(std::move(with_message)), hint(std::move(with_hint)) {}
    const char *what() const noexcept override { return message.c_str(); }

    pi_status status;
    std::string message;
    std::string hint;
};

// Text out of a file as a message can carry it: in quotes, not longer than a line, nothing that a terminal
// obeys.
std::string quoted(std::string_view text);

// A fault of the file, with the one hint that helps.
[[noreturn]] void throw_bad_file(const std::string &message);
// A fault of the caller (Python binding): an argument out of its documented range.
[[noreturn]] void throw_usage(const std::string &message);

void clear_last_error() noexcept;
// Stores the exception being handled as the thread's last error and returns its status.
pi_status store_current_exception() noexcept;

template <typename Function>
pi_status guarded(Function &&function) noexcept {
    clear_last_error();
    try {
        function();
        return PI_OK;
    } catch (...) {
        return store_current_exception();
    }
}

template <typename T>
T &require(T *pointer, const char *what) {
    if (pointer == nullptr)
        throw_usage(std::string(what) + " is NULL");
    return *pointer;
}

// Checks the `size` field that opens every struct of the interface.
template <typename T>
void require_size(const T &value, const char *what) {
    if (value.size != sizeof(T))
        throw_usage(std::string(what) + ".size does not match this library");
}

enum class LogLevel : int32_t { error = 0, warning = 1, info = 2, debug = 3 };
void log(LogLevel level, const std::string &message);

} // namespace pi
