// The steps, written once over lanes; each instruction set compiles them in a file of its own (kernels_*.cpp).
//
//   gradient, master, state --load, widen--> lanes --rule--> lanes --narrow, store--> master, state, out
//
// Every operation is one IEEE rounding in the order written here, and the files are compiled without contraction to
// fused multiply-add: all instruction sets give the same bits, and so does the PyTorch twin. An incomplete last group
// goes through the same lanes, from and to a small array, so an element's value never depends on its position.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "job.hpp"

namespace zeroshard {
namespace {  // each instruction set has its own copy: the linker must never take one for another

template <class S>
struct AdamRule {
  using F = typename S::F;
  static constexpr int STATES = 2;
  F coefficient, decay, step_size, correction, eps, one_beta1, beta2, one_beta2;
  bool decoupled;

  explicit AdamRule(const float* s)
      : coefficient(S::all(s[0])), decay(S::all(s[1])), step_size(S::all(s[2])), correction(S::all(s[3])),
        eps(S::all(s[4])), one_beta1(S::all(s[5])), beta2(S::all(s[6])), one_beta2(S::all(s[7])),
        decoupled(s[8] != 0.0f) {}

  inline void update(F g, F& p, F* state) const {
    g = S::mul(g, coefficient);
    if (decoupled) {
      p = S::mul(p, decay);
    } else {
      g = S::add(g, S::mul(p, decay));
    }
    F m = S::add(state[0], S::mul(S::sub(g, state[0]), one_beta1));
    F v = S::add(S::mul(state[1], beta2), S::mul(S::mul(g, g), one_beta2));
    F denominator = S::add(S::mul(S::sqrt(v), correction), eps);
    p = S::sub(p, S::div(S::mul(m, step_size), denominator));
    state[0] = m;
    state[1] = v;
  }
};

template <class S>
struct LionRule {
  using F = typename S::F;
  static constexpr int STATES = 1;
  F coefficient, decay, lr, beta1, one_beta1, beta2, one_beta2;

  explicit LionRule(const float* s)
      : coefficient(S::all(s[0])), decay(S::all(s[1])), lr(S::all(s[2])), beta1(S::all(s[3])),
        one_beta1(S::all(s[4])), beta2(S::all(s[5])), one_beta2(S::all(s[6])) {}

  inline void update(F g, F& p, F* state) const {
    g = S::mul(g, coefficient);
    F direction = S::sign(S::add(S::mul(state[0], beta1), S::mul(g, one_beta1)));
    p = S::sub(S::mul(p, decay), S::mul(direction, lr));
    state[0] = S::add(S::mul(state[0], beta2), S::mul(g, one_beta2));
  }
};

template <class S>
struct AdagradRule {
  using F = typename S::F;
  static constexpr int STATES = 1;
  F coefficient, decay, rate, eps;

  explicit AdagradRule(const float* s)
      : coefficient(S::all(s[0])), decay(S::all(s[1])), rate(S::all(s[2])), eps(S::all(s[3])) {}

  inline void update(F g, F& p, F* state) const {
    g = S::add(S::mul(g, coefficient), S::mul(p, decay));
    state[0] = S::add(state[0], S::mul(g, g));
    p = S::sub(p, S::div(S::mul(g, rate), S::add(S::sqrt(state[0]), eps)));
  }
};

struct nothing {};

// Bytes ahead of the loads from which memory is asked for; the hardware's own prefetchers stop at each page.
constexpr std::int64_t AHEAD = 1024;

template <class T>
inline void ask_for(const T* from) {
  const char* start = reinterpret_cast<const char*>(from) + AHEAD;
  for (std::size_t offset = 0; offset < sizeof(T) * GROUP; offset += 64) __builtin_prefetch(start + offset, 0, 3);
}

// `count` groups. `out` may be the gradient's memory if it has its dtype: each lane is read before it is written, and no
// pointer may be declared free of aliases. With `stream` it is written past the caches.
template <class S, class R, class G, class M, class O>
__attribute__((noinline)) void groups(const R& rule, float* master, const G* grad, M* const* state, O* out, bool stream,
                                      std::int64_t count) {
  using F = typename S::F;
  alignas(64) O line[GROUP];
  for (std::int64_t low = 0; low < count * GROUP; low += GROUP) {
    ask_for(master + low);
    ask_for(grad + low);
    for (int k = 0; k < R::STATES; ++k) ask_for(state[k] + low);
#pragma GCC unroll 8
    for (std::int64_t lane = 0; lane < GROUP; lane += S::WIDTH) {
      F p = S::load(master + low + lane);
      F values[R::STATES];
      for (int k = 0; k < R::STATES; ++k) values[k] = S::load(state[k] + low + lane);
      rule.update(S::load(grad + low + lane), p, values);
      S::store(master + low + lane, p);
      for (int k = 0; k < R::STATES; ++k) S::store(state[k] + low + lane, values[k]);
      if constexpr (!std::is_same<O, nothing>::value) S::store((stream ? line : out + low) + lane, p);
    }
    if constexpr (!std::is_same<O, nothing>::value) {
      // Whole lines at once: halves of a line that leave for memory one by one cost a transfer each.
      if (stream) S::stream(out + low, line, sizeof line);
    }
  }
}

// The last elements, fewer than GROUP: through copies on the stack, padded with zeros.
template <class S, class R, class G, class M, class O>
void last_group(const R& rule, float* master, const G* grad, M* const* state, O* out, std::int64_t count) {
  alignas(64) float p[GROUP] = {};
  alignas(64) G g[GROUP] = {};
  alignas(64) M s[R::STATES][GROUP] = {};
  alignas(64) O o[GROUP] = {};
  M* rows[R::STATES];
  std::memcpy(p, master, count * sizeof(float));
  std::memcpy(g, grad, count * sizeof(G));
  for (int k = 0; k < R::STATES; ++k) {
    std::memcpy(s[k], state[k], count * sizeof(M));
    rows[k] = s[k];
  }
  groups<S, R, G, M, O>(rule, p, g, rows, o, false, 1);
  std::memcpy(master, p, count * sizeof(float));
  for (int k = 0; k < R::STATES; ++k) std::memcpy(state[k], s[k], count * sizeof(M));
  if constexpr (!std::is_same<O, nothing>::value) std::memcpy(out, o, count * sizeof(O));
}

template <class S, class R, class G, class M, class O>
void sweep(const Job& job, std::int64_t begin, std::int64_t end) {
  const R rule(job.scalars);
  const std::int64_t whole = (end - begin) / GROUP, last = begin + whole * GROUP;
  const G* grad = static_cast<const G*>(job.grad);
  O* out = static_cast<O*>(job.out);
  M *state[R::STATES], *rest[R::STATES];
  for (int k = 0; k < R::STATES; ++k) {
    state[k] = static_cast<M*>(job.state[k]) + begin;
    rest[k] = state[k] + whole * GROUP;
  }
  groups<S, R, G, M, O>(rule, job.master + begin, grad + begin, state, out + begin, job.stream, whole);
  if (last < end) last_group<S, R, G, M, O>(rule, job.master + last, grad + last, rest, out + last, end - last);
  if (job.stream) S::fence();
}

template <class S, class R, class G, class M>
void by_out(const Job& job, std::int64_t begin, std::int64_t end) {
  switch (job.out_dtype) {
    case NONE: return sweep<S, R, G, M, nothing>(job, begin, end);
    case FLOAT32: return sweep<S, R, G, M, float>(job, begin, end);
    case BFLOAT16: return sweep<S, R, G, M, bf16>(job, begin, end);
    default: return sweep<S, R, G, M, fp16>(job, begin, end);
  }
}

template <class S, class R, class G>
void by_state(const Job& job, std::int64_t begin, std::int64_t end) {
  return job.state_dtype == FLOAT32 ? by_out<S, R, G, float>(job, begin, end)
                                    : by_out<S, R, G, bf16>(job, begin, end);
}

template <class S, class R>
void by_grad(const Job& job, std::int64_t begin, std::int64_t end) {
  switch (job.grad_dtype) {
    case FLOAT32: return by_state<S, R, float>(job, begin, end);
    case BFLOAT16: return by_state<S, R, bf16>(job, begin, end);
    default: return by_state<S, R, fp16>(job, begin, end);
  }
}

template <class S>
void step(const Job& job, std::int64_t begin, std::int64_t end) {
  switch (job.rule) {
    case ADAM: return by_grad<S, AdamRule<S>>(job, begin, end);
    case LION: return by_grad<S, LionRule<S>>(job, begin, end);
    default: return by_grad<S, AdagradRule<S>>(job, begin, end);
  }
}

// The sum of squares of one block in float64: one running sum for each position in a group, added up in that order.
template <class S, class G>
double block_squares(const G* grad, std::int64_t count) {
  using D = typename S::D;
  constexpr int HALF = S::WIDTH / 2 > 0 ? S::WIDTH / 2 : 1;
  D sums[GROUP / HALF];
  for (D& sum : sums) sum = S::no_squares();
  alignas(64) G rest[GROUP] = {};
  for (std::int64_t low = 0; low < count; low += GROUP) {
    const G* from = grad + low;
    __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD, 0, 3);
    if (count - low < GROUP) {
      std::memcpy(rest, from, (count - low) * sizeof(G));
      from = rest;
    }
#pragma GCC unroll 8
    for (std::int64_t lane = 0; lane < GROUP; lane += S::WIDTH) {
      S::add_squares(sums + lane / HALF, S::load(from + lane));
    }
  }
  alignas(64) double lanes[GROUP];
  for (int k = 0; k < GROUP / HALF; ++k) S::store(lanes + k * HALF, sums[k]);
  double total = 0.0;
  for (double lane : lanes) total += lane;
  return total;
}

template <class S, class G>
void squares_of(const SquaresJob& job, std::int64_t begin, std::int64_t end) {
  const G* grad = static_cast<const G*>(job.grad);
  for (std::int64_t block = begin; block < end; ++block) {
    const std::int64_t low = block * SQUARES_BLOCK;
    const std::int64_t count = job.numel - low < SQUARES_BLOCK ? job.numel - low : SQUARES_BLOCK;
    job.partial[block] = block_squares<S, G>(grad + low, count);
  }
}

template <class S>
void squares(const SquaresJob& job, std::int64_t begin, std::int64_t end) {
  switch (job.dtype) {
    case FLOAT32: return squares_of<S, float>(job, begin, end);
    case BFLOAT16: return squares_of<S, bf16>(job, begin, end);
    default: return squares_of<S, fp16>(job, begin, end);
  }
}

template <class S>
void stream(const StreamJob& job, std::int64_t begin, std::int64_t end) {
  const typename S::F scale = S::all(job.scale);
  alignas(64) float line[GROUP];
  for (std::int64_t low = begin; low < end; low += GROUP) {
    ask_for(job.b + low);
    ask_for(job.c + low);
    for (std::int64_t lane = 0; lane < GROUP; lane += S::WIDTH) {
      float *b = job.b + low + lane, *c = job.c + low + lane;
      if (job.a != nullptr) {
        S::store(line + lane, S::add(S::load(b), S::mul(S::load(c), scale)));
      } else {
        S::store(b, S::mul(S::load(b), scale));
        S::store(c, S::mul(S::load(c), scale));
      }
    }
    if (job.a != nullptr) S::stream(job.a + low, line, sizeof line);
  }
  S::fence();
}

}  // namespace
}  // namespace zeroshard
