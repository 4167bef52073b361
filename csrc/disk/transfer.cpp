// The part of an engine that is the same whoever makes the system calls: queues, accounting and waiting.
#include "transfer.hpp"

#include <errno.h>
#include <time.h>

#include <new>

namespace zeroshard {

timespec in_seconds(double seconds) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t whole = static_cast<std::int64_t>(seconds);
  std::int64_t nanos = now.tv_nsec + static_cast<std::int64_t>((seconds - static_cast<double>(whole)) * 1e9);
  now.tv_sec += static_cast<time_t>(whole + nanos / 1000000000);
  now.tv_nsec = static_cast<long>(nanos % 1000000000);
  return now;
}

void init_condition(pthread_cond_t* condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

Engine::Engine() { init_condition(&done_); }

Engine::~Engine() {
  pthread_cond_destroy(&done_);
  pthread_mutex_destroy(&state_);
}

Transfer* Engine::submit(bool write, std::int32_t file, std::int64_t offset, char* at, std::int64_t nbytes) {
  Transfer* transfer = new (std::nothrow) Transfer;
  if (transfer == nullptr) return nullptr;
  lock();
  for (std::int64_t begin = 0; begin < nbytes; begin += REQUEST_BYTES) {
    const std::int64_t length = nbytes - begin < REQUEST_BYTES ? nbytes - begin : REQUEST_BYTES;
    const Request request{transfer, file, write, offset + begin, {at + begin, static_cast<std::size_t>(length)}};
    (write ? writes_ : reads_).push_back(request);
    ++transfer->open_requests;
  }
  unlock();
  wake();
  return transfer;
}

std::int32_t Engine::wait(Transfer* transfer, double seconds) {
  const timespec end = in_seconds(seconds);
  lock();
  while (transfer->open_requests > 0) {
    if (pthread_cond_timedwait(&done_, &state_, &end) == ETIMEDOUT && transfer->open_requests > 0) {
      unlock();
      return RUNNING;
    }
  }
  unlock();
  const std::int32_t error = transfer->error;
  delete transfer;
  return error;
}

bool Engine::take(Request& request) {
  std::deque<Request>& first = write_next_ ? writes_ : reads_;
  std::deque<Request>& second = write_next_ ? reads_ : writes_;
  std::deque<Request>& from = first.empty() ? second : first;
  if (from.empty()) return false;
  request = from.front();
  from.pop_front();
  write_next_ = !request.write;
  return true;
}

void Engine::put_back(const Request& request) { (request.write ? writes_ : reads_).push_front(request); }

void Engine::ended(const Request& request, std::int32_t error) {
  if (error != 0 && request.transfer->error == 0) request.transfer->error = error;
  if (--request.transfer->open_requests == 0) pthread_cond_broadcast(&done_);
}

bool Engine::settle(Request& request, std::int64_t result) {
  if (result < 0) {
    const std::int32_t error = static_cast<std::int32_t>(-result);
    if (error == EINTR || error == EAGAIN) {
      put_back(request);
      return false;
    }
    ended(request, error);
    return true;
  }
  const std::int64_t length = static_cast<std::int64_t>(request.part.iov_len);
  if (result == length) {
    ended(request, 0);
    return true;
  }
  if (result == 0) {
    ended(request, ENDED_EARLY);
    return true;
  }
  request.offset += result;
  request.part.iov_base = static_cast<char*>(request.part.iov_base) + result;
  request.part.iov_len -= static_cast<std::size_t>(result);
  put_back(request);
  return false;
}

}  // namespace zeroshard
