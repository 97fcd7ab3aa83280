// signals.h: threads of this library leave signals to the host program's own threads.
#pragma once

#include <csignal>
#include <pthread.h>

namespace pi {

// Threads started while this lives have every signal blocked, except those that answer to a fault of their
// own: blocking these would kill the process where a handler could help.
class BlockedSignals {
  public:
    BlockedSignals() {
        sigset_t blocked;
        sigfillset(&blocked);
        for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP})
            sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    BlockedSignals(const BlockedSignals &) = delete;
    BlockedSignals &operator=(const BlockedSignals &) = delete;

  private:
    sigset_t before_;
};

} // namespace pi
