// Codes of 8 and 4 bits with a scale per block, made and read on the processor: the twin of block_codes.py, bit for bit.
//
//   record   [ codes of numel / ranks elements | float32 scales, one per block ]      one for each of `ranks`
//
// Each pass reads its source once. Torch's operations read and write memory for each of their steps, which costs a step of
// training more than a slow link does. The compiler makes a version of each loop for each instruction set
// (target_clones), and the loader picks one; nothing is contracted to a fused multiply-add, so all give the same bits.
// Rejected: intrinsics, as in the optimizers' kernels: the loops are short, and the compiler's vectors are as fast.
#include <cstdint>
#include <cstring>

#define ZEROSHARD_API extern "C" __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_SET __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define EACH_SET
#endif

namespace {

enum Dtype : std::int32_t { FLOAT32 = 1, BFLOAT16 = 2 };

constexpr float LEAST_SCALE = 1.17549435e-38f;
constexpr std::int64_t MOST = 4096;  // elements of a block
// Added and taken away again it leaves the nearest whole number, ties to even, of what is below 2^22.
constexpr float MAGIC = 12582912.0f;

INLINED float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

INLINED std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

INLINED float widened(std::uint16_t bits) { return from_bits(static_cast<std::uint32_t>(bits) << 16); }

INLINED std::uint16_t narrowed(float value) {
  const std::uint32_t bits = to_bits(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

struct Shape {
  std::int64_t numel, ranks, block, bits;
  std::int64_t part() const { return numel / ranks; }
  std::int64_t code_bytes() const { return part() * bits / 8; }
  std::int64_t record() const { return code_bytes() + part() / block * 4; }
};

// One block: codes and scale of row[0, n), and in `left` what they leave out.
INLINED float encoded(const float* row, std::int64_t n, float largest, std::int8_t* codes, float* left) {
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = to_bits(row[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const float scale = from_bits(most) / largest;
  const float inverse = scale >= LEAST_SCALE ? 1.0f / scale : 0.0f;
  for (std::int64_t i = 0; i < n; ++i) {
    const float code = row[i] * inverse + MAGIC - MAGIC;
    codes[i] = static_cast<std::int8_t>(code == code ? static_cast<std::int32_t>(code) : 0);
    left[i] = row[i] - code * scale;
  }
  return scale;
}

INLINED void unpacked(const std::uint8_t* codes, std::int64_t n, std::int64_t bits, std::int8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, static_cast<std::size_t>(n));
    return;
  }
  for (std::int64_t i = 0; i < n / 2; ++i) {
    out[i] = static_cast<std::int8_t>(static_cast<std::int8_t>(codes[i] << 4) >> 4);
    out[n / 2 + i] = static_cast<std::int8_t>(static_cast<std::int8_t>(codes[i]) >> 4);
  }
}

EACH_SET void encode(const Shape& shape, const void* values, std::int32_t dtype, std::uint16_t* error,
                     std::uint8_t* records) {
  const float largest = shape.bits == 8 ? 127.0f : 7.0f;
  const std::int64_t n = shape.block, blocks = shape.part() / n, bytes = n * shape.bits / 8;
  float row[MOST], left[MOST];
  std::int8_t codes[MOST];
  for (std::int64_t rank = 0; rank < shape.ranks; ++rank) {
    std::uint8_t* record = records + rank * shape.record();
    for (std::int64_t number = 0; number < blocks; ++number) {
      const std::int64_t at = rank * shape.part() + number * n;
      if (dtype == FLOAT32) {
        std::memcpy(row, static_cast<const float*>(values) + at, static_cast<std::size_t>(n) * 4);
      } else {
        const std::uint16_t* source = static_cast<const std::uint16_t*>(values) + at;
        for (std::int64_t i = 0; i < n; ++i) row[i] = widened(source[i]);
      }
      if (error != nullptr) {
        for (std::int64_t i = 0; i < n; ++i) row[i] += widened(error[at + i]);
      }
      const float scale = encoded(row, n, largest, codes, left);
      std::uint8_t* out = record + number * bytes;
      if (shape.bits == 8) {
        std::memcpy(out, codes, static_cast<std::size_t>(n));
      } else {
        for (std::int64_t i = 0; i < n / 2; ++i) {
          out[i] = static_cast<std::uint8_t>((codes[i] & 15) | (static_cast<std::uint8_t>(codes[n / 2 + i]) << 4));
        }
      }
      std::memcpy(record + shape.code_bytes() + number * 4, &scale, 4);
      if (error != nullptr) {
        for (std::int64_t i = 0; i < n; ++i) {
          const bool finite = (to_bits(left[i]) & 0x7f800000u) != 0x7f800000u;
          error[at + i] = narrowed(finite ? left[i] : 0.0f);
        }
      }
    }
  }
}

// Writes what the records stand for: one after the other, or, `summed`, their sum in the order of ranks.
EACH_SET void decode(const Shape& shape, const std::uint8_t* records, void* values, std::int32_t dtype, bool add,
                     bool summed) {
  const std::int64_t n = shape.block, blocks = shape.part() / n, bytes = n * shape.bits / 8;
  float total[MOST];
  std::int8_t codes[MOST];
  const std::int64_t outer = summed ? 1 : shape.ranks, inner = summed ? shape.ranks : 1;
  for (std::int64_t target = 0; target < outer; ++target) {
    for (std::int64_t number = 0; number < blocks; ++number) {
      for (std::int64_t source = 0; source < inner; ++source) {
        const std::uint8_t* record = records + (target + source) * shape.record();
        float scale;
        std::memcpy(&scale, record + shape.code_bytes() + number * 4, 4);
        unpacked(record + number * bytes, n, shape.bits, codes);
        if (source == 0) {
          for (std::int64_t i = 0; i < n; ++i) total[i] = static_cast<float>(codes[i]) * scale;
        } else {
          for (std::int64_t i = 0; i < n; ++i) total[i] += static_cast<float>(codes[i]) * scale;
        }
      }
      const std::int64_t at = target * shape.part() + number * n;
      if (dtype == FLOAT32) {
        float* out = static_cast<float*>(values) + at;
        for (std::int64_t i = 0; i < n; ++i) out[i] = add ? out[i] + total[i] : total[i];
      } else {
        std::uint16_t* out = static_cast<std::uint16_t*>(values) + at;
        for (std::int64_t i = 0; i < n; ++i) out[i] = narrowed(add ? widened(out[i]) + total[i] : total[i]);
      }
    }
  }
}

bool holds(const Shape& shape, std::int32_t dtype) {
  return shape.ranks > 0 && shape.numel >= 0 && (shape.bits == 8 || shape.bits == 4) && shape.block > 0 &&
         shape.block <= MOST && shape.numel % (shape.ranks * shape.block) == 0 &&
         (dtype == FLOAT32 || dtype == BFLOAT16);
}

}  // namespace

// Changes with the functions below; Python refuses another.
ZEROSHARD_API std::int32_t zeroshard_codes_version() { return 1; }

// `values` as records; `error`, bfloat16 or null, is added before and becomes what is left out. 0, or -1 where it can't be.
ZEROSHARD_API std::int32_t zeroshard_codes_encode(std::int64_t numel, std::int64_t ranks, std::int64_t block,
                                                  std::int64_t bits, const void* values, std::int32_t dtype,
                                                  std::uint16_t* error, std::uint8_t* records) {
  const Shape shape{numel, ranks, block, bits};
  if (!holds(shape, dtype)) return -1;
  encode(shape, values, dtype, error, records);
  return 0;
}

// What records of `numel` elements in all stand for, written or added to `values`; `summed` over the ranks.
ZEROSHARD_API std::int32_t zeroshard_codes_decode(std::int64_t numel, std::int64_t ranks, std::int64_t block,
                                                  std::int64_t bits, const std::uint8_t* records, void* values,
                                                  std::int32_t dtype, std::int32_t add, std::int32_t summed) {
  const Shape shape{numel, ranks, block, bits};
  if (!holds(shape, dtype)) return -1;
  decode(shape, records, values, dtype, add != 0, summed != 0);
  return 0;
}
