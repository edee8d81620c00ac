// SPDX-License-Identifier: Apache-2.0
// Sentences as vectors by MiniLM, a BERT, from any packed file of it and within a budget of memory:
// minilm MODEL BYTES. Each line of stdin has the ids of a sentence's tokens, as its tokenizer gives
// them, [CLS] and [SEP] included; each line of stdout is its vector, of length 1.
//
// A vector is the same, bit for bit, on every instruction set and for any number of threads.
// Weights are multiplied by linear_fixed(); all else here is +, -, *, / and square roots in one
// order, which a compiler keeps (with -ffp-contract=off), and no exp or erf of a C library, which
// differ.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "stowage/engine.h"
#include "stowage/quantize.h"

namespace {

using Matrix = std::vector<float>;  // rows one after the other
using Ids = std::vector<std::int64_t>;

constexpr std::size_t kHeadSize = 32;  // MiniLM's, which no file says
constexpr const char* kWords = "embeddings.word_embeddings.weight";
constexpr const char* kPlaces = "embeddings.position_embeddings.weight";
constexpr const char* kTypes = "embeddings.token_type_embeddings.weight";

// e^x for x <= 0: 2^n e^r with |r| <= ln(2) / 2, and a power series for e^r.
double exp_of(double x) {
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = x - n * 0.6931471805599453;
  double sum = 1;
  for (int i = 14; i > 0; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(n));
}

// x (1 + erf(x / sqrt(2))) / 2, where erf(z) = 2 / sqrt(pi) (z - z^3 / (3 1!) + z^5 / (5 2!) -
// ...).
float gelu(double x) {
  const double z = x * 0.7071067811865476;
  if (std::abs(z) > 4) return x < 0 ? 0 : static_cast<float>(x);
  double power = z, sum = z;
  for (int i = 1; std::abs(power) > 1e-12; ++i) {
    power *= -z * z / i;
    sum += power / (2 * i + 1);
  }
  return static_cast<float>(0.5 * x * (1 + 1.1283791670955126 * sum));
}

void add(Matrix& x, const Matrix& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// "101 2023 102" -> 101, 2023, 102.
Ids ids_of(const std::string& line) {
  std::istringstream words(line);
  Ids ids;
  for (std::int64_t id = 0; words >> id;) ids.push_back(id);
  if (ids.empty() || !words.eof())
    throw std::invalid_argument("stdin: a line must be token ids, got '" + line + "'");
  return ids;
}

// One row of a head: softmax(q k^T / sqrt(kHeadSize)) v, of the head's columns of k and v.
void attend(const float* q, const float* k, const float* v, std::size_t tokens, std::size_t width,
            float* out) {
  std::vector<double> shares(tokens);
  for (std::size_t j = 0; j < tokens; ++j) {
    for (std::size_t c = 0; c < kHeadSize; ++c)
      shares[j] += static_cast<double>(q[c]) * k[j * width + c];
    shares[j] /= std::sqrt(static_cast<double>(kHeadSize));
  }
  const double largest = *std::ranges::max_element(shares);
  double total = 0;
  for (double& share : shares) total += share = exp_of(share - largest);
  for (std::size_t c = 0; c < kHeadSize; ++c) {
    double sum = 0;
    for (std::size_t j = 0; j < tokens; ++j) sum += shares[j] * v[j * width + c];
    out[c] = static_cast<float>(sum / total);
  }
}

// The mean of the rows, of length 1.
Matrix pooled(const Matrix& x, std::size_t width) {
  std::vector<double> sums(width);
  for (std::size_t i = 0; i < x.size(); ++i) sums[i % width] += x[i];
  double square = 0;
  for (const double sum : sums) square += sum * sum;
  Matrix out;
  for (const double sum : sums) out.push_back(static_cast<float>(sum / std::sqrt(square)));
  return out;
}

struct MiniLm {
  stowage::Engine engine;

  // Rows of the embeddings are read where they lie in the file; all else comes in turn.
  MiniLm(const std::string& path, std::uint64_t ram)
      : engine(stowage::File::open(path), {.ram = ram, .mapped_only = {kWords, kPlaces, kTypes}}) {}

  // The vector of a sentence.
  Matrix encode(const Ids& ids) {
    Ids places(ids.size());
    std::iota(places.begin(), places.end(), 0);
    Matrix x = rows(kWords, ids);
    add(x, rows(kTypes, Ids(ids.size())));
    add(x, rows(kPlaces, places));
    normalize("embeddings.LayerNorm", x);
    for (int i = 0;; ++i) {
      const std::string layer = "encoder.layer." + std::to_string(i);
      if (!engine.find(layer + ".output.dense.weight")) return pooled(x, x.size() / ids.size());
      pass(layer, ids.size(), x);
    }
  }
  stowage::Lease lease(const std::string& name) {
    const auto id = engine.find(name);
    if (!id) throw std::invalid_argument(engine.file().paths().front() + ": must have " + name);
    return engine.acquire(*id);
  }
  Matrix rows(const std::string& name, const Ids& ids) {
    const stowage::Lease held = lease(name);
    const stowage::Weight weight = held.weight();
    const auto count = static_cast<std::int64_t>(ids.size());
    Matrix out(static_cast<std::size_t>(count * weight.row_elements()));
    stowage::embedding(weight, ids.data(), count, out.data(), stowage::Dtype::f32);
    return out;
  }
  Matrix vector(const std::string& name) {
    const stowage::Lease held = lease(name);
    const stowage::Weight weight = held.weight();
    Matrix out(static_cast<std::size_t>(weight.rows()));
    stowage::dequantize(weight, {0, weight.rows()}, out.data(), stowage::Dtype::f32);
    return out;
  }
  Matrix linear(const std::string& name, const Matrix& x) {
    const Matrix bias = vector(name + ".bias");
    const stowage::Lease held = lease(name + ".weight");
    const stowage::Weight weight = held.weight();
    const auto m = static_cast<std::int64_t>(x.size()) / weight.row_elements();
    Matrix y(static_cast<std::size_t>(m * weight.rows()));
    stowage::linear_fixed(x.data(), m, weight, bias.data(), y.data());
    return y;
  }
  void normalize(const std::string& name, Matrix& x) {
    const Matrix scale = vector(name + ".weight"), shift = vector(name + ".bias");
    const std::size_t width = scale.size();
    for (float* row = x.data(); row != x.data() + x.size(); row += width) {
      double mean = 0, variance = 0;
      for (std::size_t c = 0; c < width; ++c) mean += row[c] / static_cast<double>(width);
      for (std::size_t c = 0; c < width; ++c) variance += (row[c] - mean) * (row[c] - mean);
      const double deviation = std::sqrt(variance / static_cast<double>(width) + 1e-12);
      for (std::size_t c = 0; c < width; ++c)
        row[c] = static_cast<float>((row[c] - mean) / deviation * scale[c] + shift[c]);
    }
  }
  void pass(const std::string& layer, std::size_t tokens, Matrix& x) {
    const std::string self = layer + ".attention.self.", output = layer + ".attention.output.";
    const Matrix q = linear(self + "query", x), k = linear(self + "key", x);
    const Matrix v = linear(self + "value", x);
    const std::size_t width = x.size() / tokens;
    Matrix mixed(x.size());
    for (std::size_t at = 0; at < x.size(); at += kHeadSize)
      attend(&q[at], &k[at % width], &v[at % width], tokens, width, &mixed[at]);
    add(x, linear(output + "dense", mixed));
    normalize(output + "LayerNorm", x);
    Matrix wide = linear(layer + ".intermediate.dense", x);
    for (float& value : wide) value = gelu(value);
    add(x, linear(layer + ".output.dense", wide));
    normalize(layer + ".output.LayerNorm", x);
  }
};

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) return std::fputs("usage: minilm MODEL BYTES < ids\n", stderr), 2;
  MiniLm model(argv[1], std::stoull(argv[2]));
  for (std::string line; std::getline(std::cin, line); std::putchar('\n'))
    for (const float value : model.encode(ids_of(line)))
      std::printf("%.9g ", static_cast<double>(value));
  std::fprintf(stderr, "%ju bytes held at most\n",
               static_cast<std::uintmax_t>(model.engine.report().peak));
} catch (const std::exception& error) {
  return std::fprintf(stderr, "minilm: %s\n", error.what()), 1;
}
