// Threads that wait between steps. See pool.cpp.
#pragma once

#include <cstdint>

namespace zeroshard {

using Work = void (*)(const void* job, std::int64_t begin, std::int64_t end);

// Calls `work` for pieces of [0, count), each of `grain` but the last, on up to `threads` threads, the caller's one of
// them; returns when all are done. May be called by several threads at once; they take turns.
void run_pieces(int threads, std::int64_t count, std::int64_t grain, Work work, const void* job);

}  // namespace zeroshard
