// A pool of our own: threads that are made when first needed, wait between steps and die with the process.
//
//   caller   open round . pieces . pieces . close round . wait for those inside
//   worker        enter . pieces . leave
//
// A round is closed once the caller finds no piece left: a worker that woke too late finds it closed, so nobody waits for
// a thread that the system has not run yet. Pieces are handed out one by one: a core that others use takes fewer.
//
// Rejected: OpenMP. Its number of threads is that of the whole process, which torchrun sets to 1; a second runtime
// beside torch's spins on the same cores; and a child that forked from a process that used it hangs at its first loop.
// Here a child starts with no pool and makes its own.
#include "pool.hpp"

#include <pthread.h>

#include <atomic>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace zeroshard {
namespace {

// Round to nearest even and keep denormal numbers, whatever the thread was told: values must not depend on who
// computes them.
class Arithmetic {
 public:
#if defined(__x86_64__)
  Arithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~Arithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  Arithmetic() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~Arithmetic() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  std::uint64_t before_;
#else
  Arithmetic() {}
  ~Arithmetic() {}
#endif
};

struct Round {
  Work work;
  const void* job;
  std::int64_t count, grain;
  std::atomic<std::int64_t> next{0};

  void take_pieces() {
    const Arithmetic arithmetic;
    for (;;) {
      const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      work(job, begin, count - begin < grain ? count : begin + grain);
    }
  }
};

class Pool {
 public:
  void run(int threads, Round& round) {
    pthread_mutex_lock(&turn_);
    pthread_mutex_lock(&state_);
    grow(threads - 1);
    round_ = &round;
    places_ = threads - 1;
    pthread_cond_broadcast(&opened_);
    pthread_mutex_unlock(&state_);
    round.take_pieces();
    pthread_mutex_lock(&state_);
    round_ = nullptr;
    places_ = 0;
    while (inside_ > 0) pthread_cond_wait(&left_, &state_);
    pthread_mutex_unlock(&state_);
    pthread_mutex_unlock(&turn_);
  }

 private:
  // With fewer threads than asked for, if the system gives no more.
  void grow(int workers) {
    while (workers_ < workers) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, &Pool::main, this) != 0) return;
      pthread_detach(thread);
      ++workers_;
    }
  }

  static void* main(void* pool) {
    static_cast<Pool*>(pool)->serve();
    return nullptr;
  }

  void serve() {
    pthread_mutex_lock(&state_);
    for (;;) {
      while (places_ == 0) pthread_cond_wait(&opened_, &state_);
      --places_;
      ++inside_;
      Round& round = *round_;
      pthread_mutex_unlock(&state_);
      round.take_pieces();
      pthread_mutex_lock(&state_);
      if (--inside_ == 0) pthread_cond_signal(&left_);
    }
  }

  pthread_mutex_t turn_ = PTHREAD_MUTEX_INITIALIZER;   // one round at a time
  pthread_mutex_t state_ = PTHREAD_MUTEX_INITIALIZER;  // guards all below
  pthread_cond_t opened_ = PTHREAD_COND_INITIALIZER;
  pthread_cond_t left_ = PTHREAD_COND_INITIALIZER;
  Round* round_ = nullptr;
  int workers_ = 0, places_ = 0, inside_ = 0;
};

std::atomic<Pool*> shared_pool{nullptr};

// The threads did not come along, and locks may be held by some that did not: leave it all and start anew.
void forget_pool() { shared_pool.store(nullptr); }

Pool* pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  Pool* found = shared_pool.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  Pool* made = new (std::nothrow) Pool;
  if (made != nullptr && !shared_pool.compare_exchange_strong(found, made)) {
    delete made;
    return found;
  }
  return made;
}

}  // namespace

void run_pieces(int threads, std::int64_t count, std::int64_t grain, Work work, const void* job) {
  Round round{work, job, count, grain};
  const std::int64_t pieces = (count + grain - 1) / grain;
  if (threads > pieces) threads = static_cast<int>(pieces);
  Pool* shared = threads > 1 ? pool() : nullptr;
  if (shared == nullptr) {
    round.take_pieces();
  } else {
    shared->run(threads, round);
  }
}

}  // namespace zeroshard
