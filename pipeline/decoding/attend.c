/* Attention of decoding rows over a slot cache, on CPU. Compiled and called by native.py.
 *
 * Each row has a few query tokens (its last token and a draft) and K/V of its own length, so there
 * is nothing to pad and nothing to mask: token j of a row sees the places up to its own. A step is
 * bound by reading K and V once; every (row, K/V head) is one piece of work.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16 /* places converted to float at a time: they stay in the first cache */

typedef struct {
    const void *query; /* [N, heads, head_dim], packed */
    const void *key;   /* [slots, kv_heads, places, head_dim], by strides */
    const void *value; /* the same with value_dim */
    void *out;         /* [N, heads, value_dim], contiguous */
    const int64_t *slots, *starts, *offsets; /* per row: slot, place of its first token, index of it */
    const float *sinks;                      /* [heads] or NULL */
    int64_t rows, heads, kv_heads, head_dim, value_dim;
    int64_t query_token, query_head;               /* strides in elements */
    int64_t key_slot, key_head, key_place;
    int64_t value_slot, value_head, value_place;
    int64_t window; /* places that a token sees, or 0 */
    float scale, softcap; /* softcap 0: none */
    int is_bfloat16, threads;
} Task;

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static void to_float(const void *from, int64_t at, int64_t n, int is_bfloat16, float *restrict to) {
    if (!is_bfloat16) {
        memcpy(to, (const float *)from + at, n * sizeof(float));
        return;
    }
    const uint16_t *restrict x = (const uint16_t *)from + at;
    for (int64_t i = 0; i < n; i++) to[i] = widen(x[i]);
}

static void from_float(const float *restrict from, void *to, int64_t at, int64_t n, int is_bfloat16) {
    if (!is_bfloat16) {
        memcpy((float *)to + at, from, n * sizeof(float));
        return;
    }
    uint16_t *restrict x = (uint16_t *)to + at;
    for (int64_t i = 0; i < n; i++) x[i] = narrow(from[i]);
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Softmax of n scores in place; a sink takes part and is dropped. Returns nothing to divide by. */
static void softmax(float *restrict s, int64_t n, const float *sink) {
    float top = sink ? *sink : s[0];
    for (int64_t i = 0; i < n; i++) top = s[i] > top ? s[i] : top;
    float sum = sink ? expf(*sink - top) : 0;
    for (int64_t i = 0; i < n; i++) {
        s[i] = expf(s[i] - top);
        sum += s[i];
    }
    float inverse = 1.0f / sum;
    for (int64_t i = 0; i < n; i++) s[i] *= inverse;
}

/* One row and K/V head. scratch: queries, block, outputs, then scores of stride `length` each. */
static void attend(const Task *t, int64_t row, int64_t kv_head, float *scratch) {
    const int64_t fold = t->heads / t->kv_heads, d = t->head_dim, dv = t->value_dim;
    const int64_t width = t->offsets[row + 1] - t->offsets[row], queries = fold * width;
    const int64_t start = t->starts[row], length = start + width;
    float *q = scratch, *block = q + queries * d, *out = block + BLOCK * (d > dv ? d : dv);
    float *scores = out + queries * dv;
    const int64_t k_at = t->slots[row] * t->key_slot + kv_head * t->key_head;
    const int64_t v_at = t->slots[row] * t->value_slot + kv_head * t->value_head;

    for (int64_t i = 0; i < queries; i++) { /* query i: token i / fold, head i % fold of the group */
        int64_t token = t->offsets[row] + i / fold, head = kv_head * fold + i % fold;
        to_float(t->query, token * t->query_token + head * t->query_head, d, t->is_bfloat16, q + i * d);
        for (int64_t j = 0; j < d; j++) q[i * d + j] *= t->scale;
    }
    int64_t first = t->window && start + 1 > t->window ? start + 1 - t->window : 0;
    for (int64_t at = first; at < length; at += BLOCK) {
        int64_t n = length - at < BLOCK ? length - at : BLOCK;
        for (int64_t j = 0; j < n; j++)
            to_float(t->key, k_at + (at + j) * t->key_place, d, t->is_bfloat16, block + j * d);
        for (int64_t i = 0; i < queries; i++)
            for (int64_t j = 0; j < n; j++) scores[i * length + at + j] = dot(q + i * d, block + j * d, d);
    }
    for (int64_t i = 0; i < queries; i++) {
        int64_t place = start + i / fold; /* sees [from, place] */
        int64_t from = t->window && place + 1 > t->window ? place + 1 - t->window : 0;
        float *s = scores + i * length;
        if (t->softcap > 0)
            for (int64_t j = from; j <= place; j++) s[j] = tanhf(s[j] / t->softcap) * t->softcap;
        softmax(s + from, place + 1 - from, t->sinks ? t->sinks + kv_head * fold + i % fold : NULL);
        memset(s + first, 0, (from - first) * sizeof(float));
        memset(s + place + 1, 0, (length - place - 1) * sizeof(float));
    }
    memset(out, 0, queries * dv * sizeof(float));
    for (int64_t at = first; at < length; at += BLOCK) {
        int64_t n = length - at < BLOCK ? length - at : BLOCK;
        for (int64_t j = 0; j < n; j++)
            to_float(t->value, v_at + (at + j) * t->value_place, dv, t->is_bfloat16, block + j * dv);
        for (int64_t i = 0; i < queries; i++) {
            float *restrict o = out + i * dv;
            for (int64_t j = 0; j < n; j++) {
                const float weight = scores[i * length + at + j];
                const float *restrict v = block + j * dv;
                for (int64_t c = 0; c < dv; c++) o[c] += weight * v[c];
            }
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        int64_t token = t->offsets[row] + i / fold, head = kv_head * fold + i % fold;
        from_float(out + i * dv, t->out, (token * t->heads + head) * dv, dv, t->is_bfloat16);
    }
}

/* 0, or 1 when memory is short. */
int attend_rows(const Task *t) {
    int64_t fold = t->heads / t->kv_heads, most = 0, failed = 0;
    int64_t wide = t->head_dim > t->value_dim ? t->head_dim : t->value_dim;
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t width = t->offsets[row + 1] - t->offsets[row];
        int64_t floats = fold * width * (t->head_dim + t->value_dim + t->starts[row] + width);
        most = floats > most ? floats : most;
    }
#pragma omp parallel num_threads(t->threads) reduction(| : failed)
    {
        float *scratch = malloc((most + BLOCK * wide) * sizeof(float));
        failed = !scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < t->rows * t->kv_heads; i++)
            if (scratch) attend(t, i / t->kv_heads, i % t->kv_heads, scratch);
        free(scratch);
    }
    return (int)failed;
}
