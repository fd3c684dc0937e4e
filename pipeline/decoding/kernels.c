/* What torch is slow at in a decode step on CPU. Compiled and called by native.py.
 *
 * Attention of decoding rows over a slot cache: each row has a few query tokens (its last token and a draft) and K/V of its own length, so there
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

/* 16 numbers at a time, in whatever registers the CPU has: vectors as GCC and Clang know them. */
typedef float v16 __attribute__((vector_size(64)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t half16 __attribute__((vector_size(32), aligned(2)));
typedef uint32_t bits16 __attribute__((vector_size(64)));
typedef int32_t pick16 __attribute__((vector_size(64)));

static inline int64_t round_up(int64_t n) { return (n + 15) / 16 * 16; }

/* n numbers from `from[at]` on as floats, then zeros up to a multiple of 16. */
static inline void to_float(const void *from, int64_t at, int64_t n, int is_bfloat16, float *to) {
    int64_t i = 0;
    if (is_bfloat16) {
        const uint16_t *x = (const uint16_t *)from + at;
        for (; i + 16 <= n; i += 16) {
            bits16 bits = __builtin_convertvector(*(const half16 *)(x + i), bits16) << 16;
            *(v16 *)(to + i) = (v16)bits;
        }
        for (; i < n; i++) {
            uint32_t bits = (uint32_t)x[i] << 16;
            memcpy(to + i, &bits, 4);
        }
    } else {
        const float *x = (const float *)from + at;
        for (; i + 16 <= n; i += 16) *(v16 *)(to + i) = *(const v16_unaligned *)(x + i);
        for (; i < n; i++) to[i] = x[i];
    }
    for (; i < round_up(n); i++) to[i] = 0;
}

static inline uint16_t narrow(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static void from_float(const float *from, void *to, int64_t at, int64_t n, int is_bfloat16) {
    if (!is_bfloat16) {
        memcpy((float *)to + at, from, n * sizeof(float));
        return;
    }
    uint16_t *x = (uint16_t *)to + at;
    for (int64_t i = 0; i < n; i++) x[i] = narrow(from[i]);
}

/* Lane j of the result is the sum of all lanes of a[j]: four rounds that halve the vectors. */
static inline v16 sums(v16 *a) {
    static const pick16 low[4] = {
        {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
        {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
        {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
        {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
    };
    static const pick16 high[4] = {
        {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
        {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
        {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
        {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31},
    };
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8 >> round; j++) {
            v16 x = a[2 * j], y = a[2 * j + 1];
            a[j] = __builtin_shuffle(x, y, low[round]) + __builtin_shuffle(x, y, high[round]);
        }
    }
    return a[0];
}

/* Scores of one query (d floats, d a multiple of 16) with the BLOCK keys of a block. */
static inline v16 score(const float *query, const float *block, int64_t d) {
    v16 partial[BLOCK];
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK; j++) {
        v16 sum = {0};
        for (int64_t c = 0; c < d; c += 16) sum += *(const v16 *)(query + c) * *(const v16 *)(block + j * d + c);
        partial[j] = sum;
    }
    return sums(partial);
}

/* out += weights of the block's places times their values, d floats each. */
static inline void add_values(float *out, const float *weights, const float *block, int64_t d) {
    int64_t c = 0;
    for (; c + 64 <= d; c += 64) { /* four registers of sums at a time */
        v16 *o = (v16 *)(out + c), a = o[0], b = o[1], e = o[2], f = o[3];
        for (int j = 0; j < BLOCK; j++) {
            const v16 *v = (const v16 *)(block + j * d + c);
            a += weights[j] * v[0];
            b += weights[j] * v[1];
            e += weights[j] * v[2];
            f += weights[j] * v[3];
        }
        o[0] = a, o[1] = b, o[2] = e, o[3] = f;
    }
    for (; c < d; c += 16) {
        v16 a = *(v16 *)(out + c);
        for (int j = 0; j < BLOCK; j++) a += weights[j] * *(const v16 *)(block + j * d + c);
        *(v16 *)(out + c) = a;
    }
}

/* exp(x) for x <= 0, as in Cephes; without a call or branch, so that loops over it vectorise. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693147181f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &power, 4);
    return p * scale;
}

/* Softmax of n scores in place; a sink takes part and is dropped. */
static void softmax(float *s, int64_t n, const float *sink) {
    float top = sink ? *sink : s[0];
    for (int64_t i = 0; i < n; i++) top = s[i] > top ? s[i] : top;
    float sum = sink ? exponential(*sink - top) : 0;
    for (int64_t i = 0; i < n; i++) {
        s[i] = exponential(s[i] - top);
        sum += s[i];
    }
    float inverse = 1.0f / sum;
    for (int64_t i = 0; i < n; i++) s[i] *= inverse;
}

/* One row and K/V head, tokens [begin, end) of the row's. scratch: queries, a block, outputs, then
 * per query a line of scores. */
static void attend(const Task *t, int64_t row, int64_t kv_head, int64_t begin, int64_t end, float *scratch) {
    const int64_t fold = t->heads / t->kv_heads, d = round_up(t->head_dim), dv = round_up(t->value_dim);
    const int64_t queries = fold * (end - begin), first_token = t->offsets[row] + begin;
    const int64_t start = t->starts[row] + begin, length = t->starts[row] + end;
    const int64_t earliest = t->window && start + 1 > t->window ? start + 1 - t->window : 0;
    const int64_t first = earliest / BLOCK * BLOCK, line = round_up(length);
    float *q = scratch, *block = q + queries * d, *out = block + BLOCK * (d > dv ? d : dv);
    float *scores = out + queries * dv;
    const int64_t k_at = t->slots[row] * t->key_slot + kv_head * t->key_head;
    const int64_t v_at = t->slots[row] * t->value_slot + kv_head * t->value_head;

    for (int64_t i = 0; i < queries; i++) { /* query i: token i / fold, head i % fold of the group */
        int64_t token = first_token + i / fold, head = kv_head * fold + i % fold;
        to_float(t->query, token * t->query_token + head * t->query_head, t->head_dim, t->is_bfloat16, q + i * d);
        for (int64_t j = 0; j < d; j++) q[i * d + j] *= t->scale;
    }
    for (int64_t at = first; at < length; at += BLOCK) {
        int64_t n = length - at < BLOCK ? length - at : BLOCK; /* beyond n: old keys, never used */
        for (int64_t j = 0; j < n; j++)
            to_float(t->key, k_at + (at + j) * t->key_place, t->head_dim, t->is_bfloat16, block + j * d);
        for (int64_t i = 0; i < queries; i++) *(v16 *)(scores + i * line + at) = score(q + i * d, block, d);
    }
    for (int64_t i = 0; i < queries; i++) {
        int64_t place = start + i / fold; /* sees [from, place] */
        int64_t from = t->window && place + 1 > t->window ? place + 1 - t->window : 0;
        float *s = scores + i * line;
        if (t->softcap > 0)
            for (int64_t j = from; j <= place; j++) s[j] = tanhf(s[j] / t->softcap) * t->softcap;
        softmax(s + from, place + 1 - from, t->sinks ? t->sinks + kv_head * fold + i % fold : NULL);
        memset(s + first, 0, (from - first) * sizeof(float));
        memset(s + place + 1, 0, (line - place - 1) * sizeof(float));
    }
    memset(out, 0, queries * dv * sizeof(float));
    for (int64_t at = first; at < length; at += BLOCK) {
        int64_t n = length - at < BLOCK ? length - at : BLOCK;
        for (int64_t j = 0; j < n; j++)
            to_float(t->value, v_at + (at + j) * t->value_place, t->value_dim, t->is_bfloat16, block + j * dv);
        if (n < BLOCK) memset(block + n * dv, 0, (BLOCK - n) * dv * sizeof(float)); /* 0 * nan is nan */
        for (int64_t i = 0; i < queries; i++) add_values(out + i * dv, scores + i * line + at, block, dv);
    }
    for (int64_t i = 0; i < queries; i++) {
        int64_t token = first_token + i / fold, head = kv_head * fold + i % fold;
        from_float(out + i * dv, t->out, (token * t->heads + head) * t->value_dim, t->value_dim, t->is_bfloat16);
    }
}

/* 0, or 1 when memory is short. */
int attend_rows(const Task *t) {
    int64_t fold = t->heads / t->kv_heads, most = 0, failed = 0;
    int64_t d = round_up(t->head_dim), dv = round_up(t->value_dim);
    /* With few rows a head's tokens are shared out too, lest threads wait for the longest head. */
    int64_t heads = t->rows * t->kv_heads, parts = (2 * t->threads + heads - 1) / heads;
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t width = t->offsets[row + 1] - t->offsets[row];
        int64_t floats = fold * width * (d + dv + round_up(t->starts[row] + width));
        most = floats > most ? floats : most;
    }
#pragma omp parallel num_threads(t->threads) reduction(| : failed)
    {
        void *scratch = NULL;
        failed = posix_memalign(&scratch, 64, (most + BLOCK * (d > dv ? d : dv)) * sizeof(float));
        if (!failed) memset(scratch, 0, (most + BLOCK * (d > dv ? d : dv)) * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < heads * parts; i++) {
            int64_t row = i / parts / t->kv_heads, width = t->offsets[row + 1] - t->offsets[row];
            int64_t begin = width * (i % parts) / parts, end = width * (i % parts + 1) / parts;
            if (scratch && begin < end) attend(t, row, i / parts % t->kv_heads, begin, end, scratch);
        }
        free(scratch);
    }
    return failed != 0;
}

/* New K and V of decoding rows into the slots' storage; all strides in bytes. */
typedef struct {
    const void *new_key, *new_value; /* [N, kv_heads, size], by strides */
    void *key, *value;               /* [slots, kv_heads, places, size] from the first slot on */
    const int64_t *slots, *starts, *offsets;
    int64_t rows, kv_heads, places;
    int64_t key_token, key_head, value_token, value_head;
    int64_t key_bytes, value_bytes; /* of one head of one token */
    int64_t key_place, value_place; /* from place to place; slots and heads follow without gaps */
} Write;

void write_rows(const Write *w) {
    for (int64_t row = 0; row < w->rows; row++)
        for (int64_t token = w->offsets[row]; token < w->offsets[row + 1]; token++)
            for (int64_t head = 0; head < w->kv_heads; head++) {
                int64_t place = w->starts[row] + token - w->offsets[row];
                int64_t at = (w->slots[row] * w->kv_heads + head) * w->places + place;
                const char *k = (const char *)w->new_key + token * w->key_token + head * w->key_head;
                const char *v = (const char *)w->new_value + token * w->value_token + head * w->value_head;
                memcpy((char *)w->key + at * w->key_place, k, w->key_bytes);
                memcpy((char *)w->value + at * w->value_place, v, w->value_bytes);
            }
}

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* out = x / sqrt(mean(x^2) + eps) * scale over rows of `size` numbers, `stride` apart in x and
 * contiguous in out. scale: [size] or NULL. rounds: to bfloat16 before the scale too. */
void rms_norm(const void *x, const float *scale, void *out, int64_t rows, int64_t stride, int64_t size,
              float eps, int is_bfloat16, int rounds, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; row++) {
        float sum = 0;
        if (is_bfloat16) {
            const uint16_t *from = (const uint16_t *)x + row * stride;
            uint16_t *to = (uint16_t *)out + row * size;
            for (int64_t i = 0; i < size; i++) sum += widen(from[i]) * widen(from[i]);
            float factor = 1.0f / sqrtf(sum / size + eps);
            if (rounds && scale)
                for (int64_t i = 0; i < size; i++)
                    to[i] = narrow(widen(narrow(widen(from[i]) * factor)) * scale[i]);
            else if (scale)
                for (int64_t i = 0; i < size; i++) to[i] = narrow(widen(from[i]) * factor * scale[i]);
            else
                for (int64_t i = 0; i < size; i++) to[i] = narrow(widen(from[i]) * factor);
        } else {
            const float *from = (const float *)x + row * stride;
            float *to = (float *)out + row * size;
            for (int64_t i = 0; i < size; i++) sum += from[i] * from[i];
            float factor = 1.0f / sqrtf(sum / size + eps);
            if (scale)
                for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor * scale[i];
            else
                for (int64_t i = 0; i < size; i++) to[i] = from[i] * factor;
        }
    }
}
