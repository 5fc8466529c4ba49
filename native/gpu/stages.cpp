// SPDX-License-Identifier: Apache-2.0
//
// The stages of ops.h as launches of kernels.
#include <climits>

#include "gpu/backend.h"
#include "kernels/gemm.h"
#include "math/scalar.h"

namespace mjl::gpu {
namespace {

Matrix plain(const Tensor& t) { return {t.data, t.cols, 1}; }
Matrix transposed(const Tensor& t) { return {t.data, 1, t.cols}; }

Product product(int64_t m, int64_t n, std::initializer_list<Term> terms, float* c) {
  Product p = {};
  p.m = int32_t(m);
  p.n = int32_t(n);
  for (const Term& term : terms) p.terms[p.term_count++] = term;
  p.rule = Contraction::leaf_tree;
  p.c = c;
  return p;
}
Term term(Matrix a, Matrix b, int64_t k) { return {a, b, int32_t(k)}; }

Product forward_product(Tensor x, Tensor w, Tensor y) {
  return product(x.rows, w.rows, {term(plain(x), transposed(w), x.cols)}, y.data);
}
Term input_gradient(Tensor d_y, Tensor w) { return term(plain(d_y), plain(w), w.rows); }
Product weight_gradient(Tensor d_y, Tensor x, Tensor d_w) {
  return product(d_y.cols, x.cols, {term(transposed(d_y), plain(x), x.rows)}, d_w.data);
}

}  // namespace

template <class Arguments>
void GpuBackend::launch(Kernel kernel, int64_t blocks, int threads, const Arguments& arguments, int shared_bytes,
                        int64_t blocks_y) {
  require_live();
  const Context::Current current(*context_);
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  check("starting a kernel",
        driver_.launch(context_->function(kernel), unsigned(blocks), unsigned(blocks_y), 1, unsigned(threads), 1, 1,
                       unsigned(shared_bytes), stream_, parameters, nullptr));
}

// ---- Matrix products ----

// The products must not depend on each other. The large ones run one after the other, the small ones in one launch.
void GpuBackend::multiply(const Product* products, int count) {
  ProductsArguments small = {};
  int smalls = 0;
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    const Product& p = products[i];
    bool large = true;
    for (int t = 0; t < p.term_count; ++t) large = large && is_large(p.m, p.n, p.terms[t].k);
    if (large) {
      multiply_large(p);
    } else {
      small.product[smalls] = p;
      small.first_tile[smalls++] = int32_t(tiles);
      tiles += ceil_div(p.m, kProductTile) * ceil_div(p.n, kProductTile);
    }
  }
  if (smalls == 0) return;
  for (int i = smalls; i < kProducts; ++i) small.first_tile[i] = INT32_MAX;
  launch(Kernel::products, tiles, 256, small);
}

void GpuBackend::multiply_large(const Product& p) {
  for (int t = 0; t < p.term_count; ++t) {
    const Matrix &a = p.terms[t].a, &b = p.terms[t].b;
    const bool a_transposed = a.col_stride != 1, b_transposed = b.col_stride != 1;
    const int multiprocessors = context_->info.multiprocessors;
    const GemmPlan plan = plan_gemm(p.m, p.n, p.terms[t].k, p.rule, multiprocessors, scratch_.gemm);
    GemmArguments g = {};
    g.a = a.data;
    g.b = b.data;
    g.c = p.c;
    g.residual = t > 0 ? p.c : p.residual;
    g.lda = a_transposed ? a.col_stride : a.row_stride;
    g.ldb = b_transposed ? b.col_stride : b.row_stride;
    g.m = p.m;
    g.n = p.n;
    g.k = p.terms[t].k;
    g.resume = p.resume;
    g.leaf = plan.leaf;
    g.leaves = plan.leaves;
    g.tiles_m = plan.tiles_m;
    g.tiles_n = plan.tiles_n;
    g.whole = plan.whole;
    g.splits = plan.splits;
    g.split_leaves = plan.split_leaves;
    g.units = plan.units;
    g.levels = plan.levels;
    g.stack = scratch_.gemm.stack;
    g.nodes = scratch_.gemm.nodes;
    g.flags = scratch_.gemm.flags;
    const auto aligned = [](const float* data, int64_t ld) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ld % 4 == 0;
    };
    const bool b_aligned = aligned(g.b, g.ldb), both_aligned = b_aligned && aligned(g.a, g.lda);
    const bool large = plan.large_tile;
    Kernel kernel;
    if (a_transposed) {
      if (both_aligned)
        kernel = large ? Kernel::gemm_large_tn : Kernel::gemm_medium_tn;
      else
        kernel = large ? Kernel::gemm_large_tn_unaligned : Kernel::gemm_medium_tn_unaligned;
    } else if (b_transposed) {
      kernel = large ? Kernel::gemm_large_nt : Kernel::gemm_medium_nt;
    } else if (b_aligned) {
      kernel = large ? Kernel::gemm_large_nn : Kernel::gemm_medium_nn;
    } else {
      kernel = large ? Kernel::gemm_large_nn_unaligned : Kernel::gemm_medium_nn_unaligned;
    }
    launch(kernel, plan.grid, large ? LargeTile::kThreads : MediumTile::kThreads, g,
           large ? LargeTile::kSharedBytes : MediumTile::kSharedBytes);
  }
}

void GpuBackend::project_residual(Tensor x, Tensor w, Tensor residual, Tensor out) {
  Product p = forward_product(x, w, out);
  p.residual = residual.data;
  multiply(&p, 1);
}

void GpuBackend::logits(Tensor x, Tensor lm_head, Tensor logits) {
  const Product p = forward_product(x, lm_head, logits);
  multiply(&p, 1);
}

void GpuBackend::project_backward(Tensor d_out, Tensor x, Tensor w, Tensor d_x, Tensor d_w) {
  const Product products[] = {product(d_out.rows, w.cols, {input_gradient(d_out, w)}, d_x.data),
                              weight_gradient(d_out, x, d_w)};
  multiply(products, 2);
}

// ---- Norms ----

void GpuBackend::norm_forward(Tensor x, Tensor w, Tensor rstd, Tensor y) {
  NormArguments a = {};
  a.x = x, a.w = w, a.rstd = rstd, a.y = y;
  launch(Kernel::norm_forward, ceil_div(x.rows, kNormRows), 256, a);
}

void GpuBackend::norm_backward(Tensor d_y, Tensor x, Tensor w, Tensor rstd, Tensor d_residual, Tensor d_w, Tensor d_x) {
  const int64_t M = x.rows, D = x.cols, leaf = leaf_length(M), leaves = ceil_div(M, leaf);
  NormArguments a = {};
  a.x = x, a.w = w, a.rstd = rstd, a.d_y = d_y, a.d_residual = d_residual, a.d_x = d_x;
  a.leaf = int32_t(leaf);
  a.leaf_sums = leaves > 1 ? scratch_.norm_leaves : d_w.data;
  launch(Kernel::norm_backward, ceil_div(M, kNormRows), 256, a);
  launch(Kernel::norm_weight_gradient, ceil_div(D, 64), 64, a, 0, leaves);
  if (leaves == 1) return;
  const SumLeavesArguments sum = {scratch_.norm_leaves, int32_t(leaves), int32_t(D), d_w.data};
  launch(Kernel::sum_leaves, ceil_div(D, 64), 64, sum);
}

// ---- Embedding, rotary embedding, update ----

void GpuBackend::embed(Tokens tokens, Tensor table, Tensor x) {
  launch_elements(Kernel::embed, x.size(), EmbedArguments{tokens, table, x});
}

void GpuBackend::embed_backward(Tokens tokens, Tensor d_x, Tensor d_table) {
  require_live();
  {
    const Context::Current current(*context_);
    check("clearing memory", driver_.set_words(d_table.data, 0, size_t(d_table.size()), stream_));
  }
  launch(Kernel::embed_backward, d_x.rows, 256, EmbedArguments{tokens, d_table, d_x}, 0, ceil_div(d_x.cols, 256));
}

void GpuBackend::rotary_table(Heads heads, Tensor cos, Tensor sin) {
  launch_elements(Kernel::rotary_table, cos.size(), RotaryTableArguments{heads, cos, sin});
}

void GpuBackend::rotate(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor cos, Tensor sin, bool backward) {
  const RotateArguments a = {int32_t(tokens.length),
                             int32_t(heads.head_dim / 2),
                             int32_t(heads.n_heads),
                             int32_t(heads.n_kv),
                             backward,
                             q,
                             k,
                             cos,
                             sin};
  launch_elements(Kernel::rotate, (q.size() + k.size()) / 2, a);
}

void GpuBackend::update(const UpdateScalars* scalars, Tensor g, Tensor p, Tensor m, Tensor v, Tensor next_p,
                        Tensor next_m, Tensor next_v) {
  const UpdateArguments a = {scalars, p.size(),    g.data,      p.data,      m.data,
                             v.data,  next_p.data, next_m.data, next_v.data, result_};
  launch(Kernel::update, smaller(ceil_div(p.size(), 256), int64_t(context_->info.multiprocessors) * 16), 256, a);
}

// ---- The parts of a layer ----

void GpuBackend::norm_qkv_rotary(Tokens tokens, Heads heads, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                 Tensor w_v, Tensor cos, Tensor sin, Tensor rstd, Tensor y, Tensor q, Tensor k,
                                 Tensor v) {
  norm_forward(x, norm_w, rstd, y);
  const Product products[] = {forward_product(y, w_q, q), forward_product(y, w_k, k), forward_product(y, w_v, v)};
  multiply(products, 3);
  rotate(tokens, heads, q, k, cos, sin, false);
}

void GpuBackend::norm_gate_up(Tensor x, Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor rstd, Tensor y, Tensor gate,
                              Tensor up, Tensor gated) {
  norm_forward(x, norm_w, rstd, y);
  const Product products[] = {forward_product(y, w_gate, gate), forward_product(y, w_up, up)};
  multiply(products, 2);
  SiluArguments a = {};
  a.gate = gate, a.up = up, a.gated = gated;
  launch_elements(Kernel::silu_product, gate.size(), a);
}

void GpuBackend::gate_up_norm_backward(Tensor d_gated, Tensor gate, Tensor up, Tensor y, Tensor rstd, Tensor x,
                                       Tensor norm_w, Tensor w_gate, Tensor w_up, Tensor d_residual, Tensor d_gate,
                                       Tensor d_up, Tensor d_y, Tensor d_w_gate, Tensor d_w_up, Tensor d_norm_w,
                                       Tensor d_x) {
  SiluArguments a = {};
  a.gate = gate, a.up = up, a.d_gated = d_gated, a.d_gate = d_gate, a.d_up = d_up;
  launch_elements(Kernel::silu_product_backward, gate.size(), a);
  const Product products[] = {
      product(d_y.rows, d_y.cols, {input_gradient(d_gate, w_gate), input_gradient(d_up, w_up)}, d_y.data),
      weight_gradient(d_gate, y, d_w_gate), weight_gradient(d_up, y, d_w_up)};
  multiply(products, 3);
  norm_backward(d_y, x, norm_w, rstd, d_residual, d_norm_w, d_x);
}

void GpuBackend::qkv_norm_backward(Tokens tokens, Heads heads, Tensor d_q, Tensor d_k, Tensor d_v, Tensor cos,
                                   Tensor sin, Tensor y, Tensor rstd, Tensor x, Tensor norm_w, Tensor w_q, Tensor w_k,
                                   Tensor w_v, Tensor d_residual, Tensor d_y, Tensor d_w_q, Tensor d_w_k, Tensor d_w_v,
                                   Tensor d_norm_w, Tensor d_x) {
  rotate(tokens, heads, d_q, d_k, cos, sin, true);
  const Product products[] = {
      product(d_y.rows, d_y.cols, {input_gradient(d_q, w_q), input_gradient(d_k, w_k), input_gradient(d_v, w_v)},
              d_y.data),
      weight_gradient(d_q, y, d_w_q), weight_gradient(d_k, y, d_w_k), weight_gradient(d_v, y, d_w_v)};
  multiply(products, 4);
  norm_backward(d_y, x, norm_w, rstd, d_residual, d_norm_w, d_x);
}

// ---- Attention ----

AttentionArguments GpuBackend::attention_arguments(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v,
                                                   Tensor score_max, Tensor denominator) {
  AttentionArguments a = {};
  a.tokens = tokens;
  a.H = int32_t(heads.n_heads);
  a.KV = int32_t(heads.n_kv);
  a.HD = int32_t(heads.head_dim);
  a.aligned = a.HD % 4 == 0;  // tensors start at 64-byte boundaries
  a.scale = scalar::div(1.0f, scalar::sqrt(float(heads.head_dim)));
  a.q = q, a.k = k, a.v = v, a.score_max = score_max, a.denominator = denominator;
  a.p_panels = scratch_.panels;
  a.panel_floats = ceil_div(tokens.length, kAttentionTile) * kAttentionTile * kAttentionTile;
  a.extent_q = scratch_.extents;
  a.extent_k = a.extent_q + tokens.batch * heads.n_heads;
  a.extent_v = a.extent_k + tokens.batch * heads.n_kv;
  a.extent_d_context = a.extent_v + tokens.batch * heads.n_kv;
  a.result = result_;
  return a;
}

void GpuBackend::survey(const AttentionArguments& a, int64_t heads) {
  require_live();
  {
    const Context::Current current(*context_);
    check("clearing memory",
          driver_.set_words(a.extent_q, 0, size_t(a.tokens.batch * heads) * sizeof(Extent) / 4, stream_));
  }
  launch(Kernel::attention_survey, a.tokens.batch * ceil_div(a.tokens.length, kSurveyPositions) * heads, 256, a);
}

void GpuBackend::attention(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                           Tensor denominator, Tensor context) {
  AttentionArguments a = attention_arguments(tokens, heads, q, k, v, score_max, denominator);
  a.context = context;
  survey(a, a.H + 2 * a.KV);
  const int64_t units = ceil_div(tokens.length, kAttentionTile) * tokens.batch * a.H;
  const bool wide = a.HD > kAttentionTile;
  launch(wide ? Kernel::attention_forward_wide : Kernel::attention_forward,
         smaller(smaller(units, scratch_.panels_floats / a.panel_floats),
                 (wide ? kForwardWideCtas : kForwardCtas) * context_->info.multiprocessors),
         kAttentionThreads, a, (wide ? kForwardWideTiles : kForwardTiles) * kAttentionTileFloats * 4);
}

// In chunks, so that memory does not grow with the square of the length. The order of d_k's and d_v's chains, heads of
// a group and then queries, is that of the chunks.
void GpuBackend::attention_backward(Tokens tokens, Heads heads, Tensor q, Tensor k, Tensor v, Tensor score_max,
                                    Tensor denominator, Tensor d_context, Tensor zz, Tensor d_q, Tensor d_k,
                                    Tensor d_v) {
  AttentionArguments a = attention_arguments(tokens, heads, q, k, v, score_max, denominator);
  a.d_context = d_context, a.zz = zz, a.d_q = d_q, a.d_k = d_k, a.d_v = d_v;
  survey(a, 2 * (a.H + a.KV));
  const bool wide = a.HD > kAttentionTile;
  const int64_t group = a.H / a.KV, pairs = tokens.batch * a.KV, tiles = ceil_div(tokens.length, kAttentionTile);
  const int64_t room = scratch_.panels_floats / a.panel_floats / 2 / pairs;  // tiles of one head of each group
  const int64_t heads_at_once = larger(1, smaller(group, room / tiles));
  const int64_t tiles_at_once = heads_at_once > 1 ? tiles : smaller(tiles, room);
  for (int64_t head = 0; head < group; head += heads_at_once)
    for (int64_t tile = 0; tile < tiles; tile += tiles_at_once) {
      a.first_head = int32_t(head);
      a.heads = int32_t(smaller(heads_at_once, group - head));
      a.first_tile = int32_t(tile);
      a.tiles = int32_t(smaller(tiles_at_once, tiles - tile));
      a.ds_panels = a.p_panels + pairs * a.heads * a.tiles * a.panel_floats;
      launch(wide ? Kernel::attention_backward_query_wide : Kernel::attention_backward_query, a.tiles * pairs * a.heads,
             kAttentionThreads, a, kQueryTiles * kAttentionTileFloats * 4);
      launch(wide ? Kernel::attention_backward_key_wide : Kernel::attention_backward_key, tiles * pairs,
             kAttentionThreads, a, (wide ? kKeyWideTiles : kKeyTiles) * kAttentionTileFloats * 4,
             ceil_div(a.HD, wide ? 2 * kAttentionTile : kAttentionTile));
    }
}

// ---- Head ----

// Logits, row losses and, where asked, dlogits (in place of the logits) of tokens first .. first + rows - 1.
void GpuBackend::head_panel(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, int64_t first, int64_t rows,
                            bool gradient) {
  const int64_t V = lm_head.rows, D = x.cols;
  logits({x.data + first * D, rows, D}, lm_head, {scratch_.logits, rows, V});
  const HeadArguments a = {tokens,   first,           int32_t(rows),     int32_t(V), rule,
                           gradient, scratch_.logits, scratch_.row_loss, result_};
  launch(Kernel::head_rows, rows, 512, a);
}

void GpuBackend::mean_loss(int64_t count, Contraction rule) {
  const int64_t leaf = rule == Contraction::chain ? kLossBlock : leaf_length(count);
  const MeanLossArguments a = {scratch_.row_loss, int32_t(count), int32_t(leaf), scratch_.loss_leaves, result_};
  launch(Kernel::mean_loss, 1, 1024, a);
}

void GpuBackend::head_loss(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule) {
  const int64_t M = tokens.count(), panel = scratch_.head_rows;
  for (int64_t first = 0; first < M; first += panel)
    head_panel(tokens, x, lm_head, rule, first, smaller(panel, M - first), false);
  mean_loss(M, rule);
}

void GpuBackend::head_loss_backward(Tokens tokens, Tensor x, Tensor lm_head, Contraction rule, Tensor d_x,
                                    Tensor d_lm_head) {
  const int64_t M = tokens.count(), V = lm_head.rows, D = x.cols, panel = scratch_.head_rows;
  for (int64_t first = 0; first < M; first += panel) {
    const int64_t rows = smaller(panel, M - first);
    head_panel(tokens, x, lm_head, rule, first, rows, true);
    const Tensor d_logits = {scratch_.logits, rows, V}, x_rows = {x.data + first * D, rows, D};
    Product products[] = {product(rows, D, {input_gradient(d_logits, lm_head)}, d_x.data + first * D),
                          weight_gradient(d_logits, x_rows, d_lm_head)};
    products[0].rule = products[1].rule = rule;
    products[1].resume = first > 0;
    multiply(products, 2);
  }
  mean_loss(M, rule);
}

}  // namespace mjl::gpu
