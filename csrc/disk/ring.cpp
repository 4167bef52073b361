// Requests served by io_uring, through raw system calls: one thread keeps up to `depth` of them with the kernel.
//
//   submit --queue--> thread --submission ring--> kernel --completion ring--> thread --> transfer ended
//          --eventfd-> wakes the thread: a poll of it is always in the ring
//
// Rejected: liburing, a library more at installation for a hundred lines; and submitting from the caller's thread, which
// would have to come back in time to refill the ring.
#include "transfer.hpp"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <errno.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <vector>

#if defined(__NR_io_uring_setup) && defined(__NR_io_uring_enter)
namespace zeroshard {
namespace {

constexpr std::uint64_t WAKE = ~std::uint64_t{0};

// The two rings that are shared with the kernel.
class Ring {
 public:
  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (file_ >= 0) close(file_);
  }

  bool open(unsigned depth) {
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    file_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
    if (file_ < 0 || (params.features & IORING_FEAT_SINGLE_MMAP) == 0) return false;
    const std::size_t submission = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t completion = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = submission > completion ? submission : completion;
    void* rings = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return false;
    rings_ = static_cast<char*>(rings);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, IORING_OFF_SQES);
    if (entries == MAP_FAILED) return false;
    entries_ = static_cast<io_uring_sqe*>(entries);
    submit_tail_ = number(params.sq_off.tail);
    submit_mask_ = *number(params.sq_off.ring_mask);
    submit_array_ = number(params.sq_off.array);
    complete_head_ = number(params.cq_off.head);
    complete_tail_ = number(params.cq_off.tail);
    complete_mask_ = *number(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    return true;
  }

  void push(const io_uring_sqe& entry) {
    const unsigned tail = *submit_tail_;
    entries_[tail & submit_mask_] = entry;
    submit_array_[tail & submit_mask_] = tail & submit_mask_;
    __atomic_store_n(submit_tail_, tail + 1, __ATOMIC_RELEASE);
    ++pushed_;
  }

  // Hands over what was pushed and waits for at least one completion. 0, or an errno.
  int enter() {
    const long taken = syscall(__NR_io_uring_enter, file_, pushed_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken < 0) return errno;
    pushed_ -= static_cast<unsigned>(taken);
    return 0;
  }

  bool pop(std::uint64_t& what, std::int32_t& result) {
    const unsigned head = *complete_head_;
    if (head == __atomic_load_n(complete_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& found = completions_[head & complete_mask_];
    what = found.user_data;
    result = found.res;
    __atomic_store_n(complete_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  unsigned* number(unsigned at) { return reinterpret_cast<unsigned*>(rings_ + at); }

  int file_ = -1;
  char* rings_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  std::size_t rings_bytes_ = 0, entries_bytes_ = 0;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr, *complete_head_ = nullptr, *complete_tail_ = nullptr;
  unsigned submit_mask_ = 0, complete_mask_ = 0, pushed_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

class RingEngine : public Engine {
 public:
  ~RingEngine() override {
    if (event_ >= 0) close(event_);
  }

  bool start(std::int32_t depth) {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0 || !ring_.open(static_cast<unsigned>(depth) + 1)) return false;
    places_.resize(static_cast<std::size_t>(depth));
    for (std::int32_t place = depth - 1; place >= 0; --place) free_.push_back(static_cast<std::uint64_t>(place));
    pthread_t thread;
    running_ = pthread_create(&thread, nullptr, &RingEngine::main, this) == 0;
    if (running_) pthread_detach(thread);
    return running_;
  }

  bool stop(double seconds) override {
    const timespec end = in_seconds(seconds);
    lock();
    stopping_ = true;
    unlock();
    wake();
    lock();
    while (running_) {
      if (pthread_cond_timedwait(&done_, &state_, &end) == ETIMEDOUT) break;
    }
    const bool ended = !running_;
    unlock();
    return ended;
  }

 protected:
  void wake() override {
    const std::uint64_t one = 1;
    const ssize_t written = ::write(event_, &one, sizeof one);
    (void)written;  // full: the thread is about to wake anyway
  }

 private:
  static void* main(void* engine) {
    static_cast<RingEngine*>(engine)->serve();
    return nullptr;
  }

  void serve() {
    listen();
    for (;;) {
      lock();
      if (stopping_ && free_.size() == places_.size()) break;
      Request request;
      while (!stopping_ && !free_.empty() && take(request)) begin(request);
      unlock();
      const int error = ring_.enter();
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) {
        lock();
        give_up(error);
        break;
      }
      lock();
      collect();
      unlock();
    }
    running_ = false;
    pthread_cond_broadcast(&done_);
    unlock();
  }

  void listen() {
    io_uring_sqe entry;
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = event_;
    entry.poll_events = POLLIN;
    entry.user_data = WAKE;
    ring_.push(entry);
  }

  void begin(const Request& request) {
    const std::uint64_t place = free_.back();
    free_.pop_back();
    places_[place] = request;
    io_uring_sqe entry;
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = request.write ? IORING_OP_WRITEV : IORING_OP_READV;
    entry.fd = request.file;
    entry.addr = reinterpret_cast<std::uint64_t>(&places_[place].part);
    entry.len = 1;
    entry.off = static_cast<std::uint64_t>(request.offset);
    entry.user_data = place;
    ring_.push(entry);
  }

  void collect() {
    std::uint64_t what = 0;
    std::int32_t result = 0;
    while (ring_.pop(what, result)) {
      if (what == WAKE) {
        std::uint64_t count = 0;
        const ssize_t taken = ::read(event_, &count, sizeof count);
        (void)taken;
        listen();
        continue;
      }
      settle(places_[what], result);
      free_.push_back(what);
    }
  }

  // The ring itself failed: nothing that the kernel has can be heard of any more.
  void give_up(int error) {
    stopping_ = true;
    std::vector<bool> idle(places_.size(), false);
    for (const std::uint64_t place : free_) idle[place] = true;
    for (std::size_t place = 0; place < places_.size(); ++place) {
      if (!idle[place]) ended(places_[place], error);
    }
    Request request;
    while (take(request)) ended(request, error);
  }

  Ring ring_;
  int event_ = -1;
  bool running_ = false;
  std::vector<Request> places_;
  std::vector<std::uint64_t> free_;
};

}  // namespace

Engine* make_ring_engine(std::int32_t depth) {
  RingEngine* engine = new (std::nothrow) RingEngine;
  if (engine != nullptr && !engine->start(depth)) {
    delete engine;
    return nullptr;
  }
  return engine;
}

}  // namespace zeroshard
#define ZEROSHARD_HAS_RING 1
#endif
#endif

#if !defined(ZEROSHARD_HAS_RING)
namespace zeroshard {
Engine* make_ring_engine(std::int32_t) { return nullptr; }
}  // namespace zeroshard
#endif
