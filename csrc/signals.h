// Threads that leave the process's signals to others.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace pyckpt {

// Threads inherit the signal mask: those that are made while one of these lives take no signals,
// which so go to threads that expect them (Python's main thread).
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // Those that say that this very thread did wrong are for the handlers that tell where.
    for (const int fatal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fatal);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace pyckpt
