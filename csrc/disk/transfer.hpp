// A transfer between memory and a file, cut into requests, and what an engine that serves them has to do.
//
//   submit: transfer -> requests of at most REQUEST_BYTES, in the queue of reads or of writes
//   serve:  a request from each queue in turn, so that neither direction of the disk waits for the other
//   wait:   until the last request of a transfer has ended; the first error of any of them is the transfer's
#pragma once

#include <pthread.h>
#include <sys/uio.h>

#include <cstdint>
#include <deque>

namespace zeroshard {

constexpr std::int64_t REQUEST_BYTES = 1 << 20;
// What a transfer ends with beside an errno: the file ended before all bytes were there.
constexpr std::int32_t ENDED_EARLY = -2;
constexpr std::int32_t RUNNING = -1;

struct Transfer {
  std::int64_t open_requests = 0;
  std::int32_t error = 0;
};

struct Request {
  Transfer* transfer;
  std::int32_t file;
  bool write;
  std::int64_t offset;
  iovec part;
};

class Engine {
 public:
  Engine();
  virtual ~Engine();

  Transfer* submit(bool write, std::int32_t file, std::int64_t offset, char* at, std::int64_t nbytes);
  // 0, an errno, ENDED_EARLY, or RUNNING after so many seconds; all but RUNNING end the life of the transfer.
  std::int32_t wait(Transfer* transfer, double seconds);
  // Starts nothing more, and waits for what the kernel has. False after so many seconds: the engine must stay.
  virtual bool stop(double seconds) = 0;

 protected:
  // All but `wake` are called with the lock held.
  virtual void wake() = 0;
  bool take(Request& request);
  void put_back(const Request& request);
  void ended(const Request& request, std::int32_t error);
  // What a system call gave for a request: whether it has ended, else its rest is put back.
  bool settle(Request& request, std::int64_t result);

  void lock() { pthread_mutex_lock(&state_); }
  void unlock() { pthread_mutex_unlock(&state_); }

  pthread_mutex_t state_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t done_;
  bool stopping_ = false;

 private:
  std::deque<Request> reads_, writes_;
  bool write_next_ = false;
};

// Absolute time in so many seconds on the clock that conditions of an Engine use.
timespec in_seconds(double seconds);
void init_condition(pthread_cond_t* condition);

// Null where the system has no io_uring, or none for this process.
Engine* make_ring_engine(std::int32_t depth);
// Null where no thread can be started.
Engine* make_thread_engine(std::int32_t threads);

}  // namespace zeroshard
