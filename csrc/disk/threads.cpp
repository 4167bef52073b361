// Requests served by threads that call preadv and pwritev: where there is no io_uring, and to hold that to.
#include <errno.h>
#include <pthread.h>
#include <sys/uio.h>

#include <new>

#include "transfer.hpp"

namespace zeroshard {
namespace {

class ThreadEngine : public Engine {
 public:
  ThreadEngine() { init_condition(&work_); }

  bool start(std::int32_t threads) {
    for (; running_ < threads; ++running_) {
      pthread_t thread;
      if (pthread_create(&thread, nullptr, &ThreadEngine::main, this) != 0) break;
      pthread_detach(thread);
    }
    return running_ > 0;
  }

  bool stop(double seconds) override {
    const timespec end = in_seconds(seconds);
    lock();
    stopping_ = true;
    pthread_cond_broadcast(&work_);
    while (running_ > 0) {
      if (pthread_cond_timedwait(&done_, &state_, &end) == ETIMEDOUT) break;
    }
    const bool all = running_ == 0;
    unlock();
    return all;
  }

 protected:
  void wake() override {
    lock();
    pthread_cond_broadcast(&work_);
    unlock();
  }

 private:
  static void* main(void* engine) {
    static_cast<ThreadEngine*>(engine)->serve();
    return nullptr;
  }

  void serve() {
    lock();
    for (;;) {
      Request request;
      while (!stopping_ && !take(request)) pthread_cond_wait(&work_, &state_);
      if (stopping_) break;
      do {
        unlock();
        const ssize_t result = request.write ? pwritev(request.file, &request.part, 1, request.offset)
                                             : preadv(request.file, &request.part, 1, request.offset);
        const std::int64_t found = result < 0 ? -static_cast<std::int64_t>(errno) : result;
        lock();
        if (settle(request, found)) break;
      } while (take(request));
    }
    --running_;
    pthread_cond_broadcast(&done_);
    unlock();
  }

  pthread_cond_t work_;
  std::int32_t running_ = 0;
};

}  // namespace

Engine* make_thread_engine(std::int32_t threads) {
  ThreadEngine* engine = new (std::nothrow) ThreadEngine;
  if (engine != nullptr && !engine->start(threads)) {
    delete engine;
    return nullptr;
  }
  return engine;
}

}  // namespace zeroshard
