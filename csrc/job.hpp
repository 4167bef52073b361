// What a step is told, and what each instruction set offers. Shared by all files; holds no code.
#pragma once

#include <cstdint>

namespace zeroshard {

// Elements by their bits. 16-bit floats have no arithmetic of their own here: they are loaded into float32 lanes.
struct bf16 {
  std::uint16_t bits;
};
struct fp16 {
  std::uint16_t bits;
};

enum Dtype : std::int32_t { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };
enum RuleKind : std::int32_t { ADAM = 0, LION = 1, ADAGRAD = 2 };

// Elements that are handled together; all cuts between threads are multiples of it.
constexpr std::int64_t GROUP = 32;
// Elements whose squares make one partial sum.
constexpr std::int64_t SQUARES_BLOCK = 16384;

// One optimizer step over flat memory. `scalars`, all float32:
//   adam     coefficient, decay, step size, 1/sqrt(correction 2), eps, 1-beta1, beta2, 1-beta2, decoupled (0 or 1)
//   lion     coefficient, decay, lr, beta1, 1-beta1, beta2, 1-beta2
//   adagrad  coefficient, decay, rate, eps
struct Job {
  std::int32_t rule;
  std::int32_t grad_dtype, state_dtype, out_dtype;
  float scalars[9];
  float* master;
  const void* grad;
  void* state[2];  // the second is null but for adam
  void* out;       // null where out_dtype is NONE
  bool stream;     // write `out` past the caches; it is aligned to 64 bytes then
  std::int64_t numel;
};

struct SquaresJob {
  std::int32_t dtype;
  const void* grad;
  double* partial;  // one for each block
  std::int64_t numel;
};

// What memory gives, for benchmarks: a = b + scale * c, written past the caches; or, where `a` is null, b and c times
// `scale` in place. 12 and 16 bytes an element; addresses are aligned to 64 bytes.
struct StreamJob {
  float *a, *b, *c;
  float scale;
  std::int64_t numel;
};

struct InstructionSet {
  const char* name;
  // Elements [begin, end); begin is a multiple of GROUP, end too unless it is numel.
  void (*step)(const Job& job, std::int64_t begin, std::int64_t end);
  // Blocks [begin, end).
  void (*squares)(const SquaresJob& job, std::int64_t begin, std::int64_t end);
  // Elements [begin, end), multiples of GROUP.
  void (*stream)(const StreamJob& job, std::int64_t begin, std::int64_t end);
};

}  // namespace zeroshard
