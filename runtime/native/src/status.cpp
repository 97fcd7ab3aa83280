#include "status.h"

#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>

namespace pi {
namespace {

thread_local std::string last_message;
thread_local std::string last_hint;

std::mutex log_mutex;
pi_log_fn log_callback = nullptr;
void *log_user = nullptr;

void store(const char *message, const char *hint) noexcept {
    try {
        last_message = message;
        last_hint = hint;
    } catch (...) { // no memory even for the message: an empty one is still a failure status
        last_message.clear();
        last_hint.clear();
    }
}

pi_status store_out_of_memory() noexcept {
    store("out of memory", "use a smaller context (-c), fewer sequences or a smaller model");
    return PI_DOES_NOT_FIT;
}

} // namespace

std::string quoted(std::string_view text) {
    constexpr size_t longest = 60;
    std::string shown = "'";
    for (const char c : text.substr(0, longest))
        shown += c >= 0x20 && c < 0x7f ? c : '?';
    return shown + (text.size() > longest ? "...'" : "'");
}

void throw_bad_file(const std::string &message) {
    throw Error(PI_FAILURE, message, "the file is damaged or not a model; download or convert it again");
}

void throw_usage(const std::string &message) {
    throw Error(PI_USAGE, message);
}

void clear_last_error() noexcept {
    last_message.clear();
    last_hint.clear();
}

pi_status store_current_exception() noexcept {
    try {
        throw;
    } catch (const Error &error) {
        store(error.message.c_str(), error.hint.c_str());
        return error.status;
    } catch (const std::bad_alloc &) {
        return store_out_of_memory();
    } catch (const std::length_error &) {
        return store_out_of_memory();
    } catch (const std::system_error &error) { // a thread that the system refuses
        store(error.what(), "close other programs, or raise the limit on threads");
        return PI_FAILURE;
    } catch (const std::exception &error) {
        store(error.what(), "");
        return PI_FAILURE;
    } catch (...) {
        store("unknown failure in the native runtime", "");
        return PI_FAILURE;
    }
}

void log(LogLevel level, const std::string &message) {
    const std::lock_guard lock(log_mutex);
    if (log_callback != nullptr)
        log_callback(static_cast<int32_t>(level), message.c_str(), log_user);
}

} // namespace pi

uint32_t pi_abi_version(void) {
    return PI_ABI_VERSION;
}

const char *pi_last_error(void) {
    return pi::last_message.c_str();
}

const char *pi_last_hint(void) {
    return pi::last_hint.c_str();
}

void pi_set_log(pi_log_fn callback, void *user) {
    const std::lock_guard lock(pi::log_mutex);
    pi::log_callback = callback;
    pi::log_user = user;
}
