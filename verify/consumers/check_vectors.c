/* Check golden vectors in plain C99: cc -O2 check_vectors.c -o check_vectors && ./check_vectors data/vectors/mha.txt ...
 *
 * Reads the lines of numbers that data/vectors/README.md describes, fills the source, moves by its own arithmetic and
 * compares SHA-256. To check your implementation instead, define `move` (see there) in a file of yours:
 *
 *     cc -O2 -DMOVER='"mine.c"' check_vectors.c -o check_mine && ./check_mine data/vectors/mha.txt ...
 *
 * The pools are small: offsets cut to 32 bits and page numbers cut to 16 pass. data/vectors/README.md tells how to test
 * those ("What they cannot show"). */

#include <inttypes.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, PAGE_UNIFIED, PAGE_FIRST_KV_SPLIT };
enum { NO_REASON, LAYOUT, UNEQUAL, PARTIAL_PAGE, MISALIGNED, NOT_CONSECUTIVE, OUT_OF_RANGE, WRITTEN_TWICE };
enum { PAGES, INDICES, ENTRIES };
enum { HOST, DEVICE };
enum { TOKEN, PAGE, SLOT };
enum { OK, MUST_REFUSE, UNSPECIFIED }; /* what a case wants */
enum { POISON = 0xFF, UNSUPPORTED = -1, VERSION = 2 };
enum { GUARD = 256, GUARD_BYTE = 0xFE }; /* a byte that is neither payload nor poison */

typedef struct { int64_t n, *at; } List;
typedef struct { int64_t id, kind, element_bytes, heads, lanes, unit, parts, entries; List widths, layers; } Component;
typedef struct { int64_t first, lanes, bytes; List components, layers; char filled[65]; } Buffer;
typedef struct {
    int64_t layout, page_size, pages[2], groups, parts, buffers[2], cases;
    Component *part;
    Buffer *buffer[2];
} Group;
typedef struct { int64_t direction, result, reason, unit; List layers, items[2]; } Case; /* layers.n -1: all of them */

/* ---- SHA-256 (FIPS 180-4) */

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void block(uint32_t h[8], const uint8_t *p) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++) w[i] = (uint32_t)p[4 * i] << 24 | p[4 * i + 1] << 16 | p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t a = v[0], e = v[4];
        uint32_t t = v[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
        uint32_t s = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t;
        v[0] = t + s;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

static void sha256(const uint8_t *data, int64_t n, char hex[65]) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t tail[128] = {0};
    int64_t whole = n / 64 * 64, rest = n - whole, last = rest < 56 ? 64 : 128;
    for (int64_t i = 0; i < whole; i += 64) block(h, data + i);
    memcpy(tail, data + whole, rest);
    tail[rest] = 0x80;
    for (int i = 0; i < 8; i++) tail[last - 1 - i] = (uint8_t)((uint64_t)n * 8 >> 8 * i);
    for (int64_t i = 0; i < last; i += 64) block(h, tail + i);
    for (int i = 0; i < 8; i++) sprintf(hex + 8 * i, "%08" PRIx32, h[i]);
}

/* ---- reading */

static FILE *in;

static void word(char *to) {
    if (fscanf(in, "%127s", to) != 1) { fprintf(stderr, "the file ends too early\n"); exit(2); }
}

static void expect(const char *keyword) {
    char found[128];
    word(found);
    if (strcmp(found, keyword)) { fprintf(stderr, "%s expected, found %s\n", keyword, found); exit(2); }
}

static int64_t number(void) {
    char text[128], *end;
    word(text);
    int64_t value = strtoll(text, &end, 10);
    if (*end) { fprintf(stderr, "number expected, found %s\n", text); exit(2); }
    return value;
}

/* A list, its length first; -1 for none. */
static List list(void) {
    List l = {number(), NULL};
    l.at = malloc((l.n > 0 ? l.n : 1) * sizeof *l.at);
    for (int64_t i = 0; i < l.n; i++) l.at[i] = number();
    return l;
}

static Group read_group(char *id) {
    Group g;
    expect("group");
    word(id);
    int64_t *plain[] = {&g.layout, &g.page_size, &g.pages[HOST], &g.pages[DEVICE], &g.groups, &g.parts, &g.buffers[HOST],
                        &g.buffers[DEVICE], &g.cases};
    for (int i = 0; i < 9; i++) *plain[i] = number();
    g.part = malloc((g.parts + 1) * sizeof *g.part);
    for (Component *c = g.part; c < g.part + g.parts; c++) {
        expect("component");
        int64_t *of[] = {&c->id, &c->kind, &c->element_bytes, &c->heads, &c->lanes, &c->unit, &c->parts, &c->entries};
        for (int i = 0; i < 8; i++) *of[i] = number();
        c->widths = list();
        c->layers = list();
    }
    for (int side = HOST; side <= DEVICE; side++) {
        g.buffer[side] = malloc((g.buffers[side] + 1) * sizeof(Buffer));
        for (Buffer *b = g.buffer[side]; b < g.buffer[side] + g.buffers[side]; b++) {
            expect("buffer");
            b->first = number(), b->lanes = number(), b->bytes = number();
            b->components = list(), b->layers = list();
            word(b->filled);
        }
    }
    return g;
}

static Case read_case(char *id) {
    Case t;
    expect("case");
    word(id);
    t.direction = number(), t.result = number(), t.reason = number(), t.unit = number();
    expect("layers"), t.layers = list();
    expect("host"), t.items[HOST] = list();
    expect("device"), t.items[DEVICE] = list();
    return t;
}

/* ---- what is right */

static uint8_t payload(int64_t component, int64_t layer, int64_t page, int64_t token, int64_t head, int64_t byte) {
    const uint64_t m = UINT64_MAX >> 1;
    uint64_t n = ((((uint64_t)component << 8 | layer) << 14 | page) << 10 | token) << 8 | head;
    uint64_t z = ((n << 16 | byte / 8) + 0x9E3779B97F4A7C15u) & m;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u & m;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu & m;
    z ^= z >> 31;
    for (int64_t i = byte % 8; i > 0; i--) z /= 251;
    return (uint8_t)(z % 251 + 1);
}

/* Where a byte lies in a buffer. `layer` and `part` are positions in it. */
static int64_t offset(const Group *g, int side, const Buffer *b, int64_t part, int64_t layer, int64_t page, int64_t token,
                      int64_t head, int64_t lane) {
    const Component *c = &g->part[b->components.at[0]];
    int64_t heads = c->heads ? c->heads : 1, tokens = c->unit == TOKEN ? g->page_size : 1;
    int64_t layers = b->layers.n, parts = b->components.n, each = heads / (c->heads ? g->groups : 1);
    switch (side == HOST ? g->layout : LAYER_FIRST) {
    case LAYER_FIRST: return (((layer * g->pages[side] + page) * tokens + token) * heads + head) * b->lanes + lane;
    case PAGE_FIRST: return (((page * tokens + token) * layers + layer) * heads + head) * b->lanes + lane;
    case PAGE_HEAD: return (((page * heads + head) * tokens + token) * layers + layer) * b->lanes + lane;
    case PAGE_UNIFIED:
        return (((((page * (heads / each) + head / each) * layers + layer) * parts + part) * tokens + token) * each +
                head % each) * b->lanes + lane;
    default: return (((page * layers + layer) * tokens + token) * heads + head) * b->lanes + lane;
    }
}

/* Where a value stands in a list; -1 where it does not. */
static int64_t position(const List *l, int64_t value) {
    for (int64_t i = 0; i < l->n; i++)
        if (l->at[i] == value) return i;
    return -1;
}

/* The component that a part of a buffer is, and its numbers of tokens and heads. */
static const Component *part_of(const Group *g, const Buffer *b, int64_t part, int64_t *tokens, int64_t *heads) {
    const Component *c = &g->part[b->components.at[part]];
    *tokens = c->unit == TOKEN ? g->page_size : 1;
    *heads = c->heads ? c->heads : 1;
    return c;
}

static void fill(const Group *g, int side, const Buffer *b, uint8_t *out) {
    int64_t tokens, heads;
    for (int64_t part = 0; part < b->components.n; part++) {
        const Component *c = part_of(g, b, part, &tokens, &heads);
        for (int64_t i = 0; i < b->layers.n; i++)
            for (int64_t page = 0; page < g->pages[side]; page++)
                for (int64_t token = 0; token < tokens; token++)
                    for (int64_t head = 0; head < heads; head++)
                        for (int64_t k = 0; k < b->lanes; k++)
                            out[offset(g, side, b, part, i, page, token, head, k)] =
                                payload(c->id, b->layers.at[i], page, token, head, b->first + k);
    }
}

/* What page or entry `to` of a buffer gets from page or entry `from` of a buffer `s` on the other side. */
static void copy(const Group *g, const Case *t, int side, const Buffer *b, uint8_t *out, const Buffer *s,
                 const uint8_t *in, int64_t to, int64_t from) {
    int64_t tokens, heads, first = b->first > s->first ? b->first : s->first;
    int64_t end = b->first + b->lanes < s->first + s->lanes ? b->first + b->lanes : s->first + s->lanes;
    for (int64_t part = 0; part < b->components.n; part++) {
        const Component *c = part_of(g, b, part, &tokens, &heads);
        int64_t other = position(&s->components, b->components.at[part]);
        for (int64_t i = 0; i < b->layers.n && other >= 0; i++) {
            int64_t layer = b->layers.at[i], j = position(&s->layers, layer), begin = 0;
            if (j < 0 || (t->layers.n >= 0 && position(&t->layers, layer) < 0)) continue;
            if (t->unit == ENTRIES) {
                for (int64_t n = 0; n < c->widths.n; begin += c->entries * c->widths.at[n++])
                    for (int64_t k = 0, w = c->widths.at[n]; k < w; k++)
                        out[offset(g, side, b, part, i, to / c->entries, 0, 0, begin + to % c->entries * w + k)] = in[
                            offset(g, !side, s, other, j, from / c->entries, 0, 0, begin + from % c->entries * w + k)];
                continue;
            }
            for (int64_t token = 0; token < tokens; token++)
                for (int64_t head = 0; head < heads; head++)
                    for (int64_t lane = first; lane < end; lane++)
                        out[offset(g, side, b, part, i, to, token, head, lane - b->first)] =
                            in[offset(g, !side, s, other, j, from, token, head, lane - s->first)];
        }
    }
}

static int same_list(const List *a, const List *b) { return a->n == b->n && !memcmp(a->at, b->at, a->n * sizeof *a->at); }

static int layout_refused(const Group *g) {
    int headless = 0, split = 0;
    for (int64_t i = 0; i < g->parts; i++) headless |= !g->part[i].heads, split |= g->part[i].parts > 0;
    const Component *k = g->part, *v = g->part + 1;
    int pair = g->parts == 2 && k->kind == 1 && v->kind == 2 && k->element_bytes == v->element_bytes &&
               k->heads == v->heads && k->lanes == v->lanes && same_list(&k->layers, &v->layers);
    return (g->layout == PAGE_HEAD && headless) || (g->layout == PAGE_UNIFIED && g->parts > 1 && !pair) ||
           (g->layout == PAGE_FIRST_KV_SPLIT && !split);
}

/* Why the list of one side must be refused. Lists of indices become lists of pages. */
static int list_refused(const Group *g, int side, int64_t unit, int is_destination, List *l) {
    int64_t p = unit == INDICES ? g->page_size : 1, limit = g->pages[side] * (unit == ENTRIES ? g->part->entries : 1);
    if (l->n % p) return PARTIAL_PAGE;
    for (int64_t i = 0; i < l->n; i += p)
        if (l->at[i] % p) return MISALIGNED;
    for (int64_t i = 0; i < l->n; i++)
        if (l->at[i] != l->at[i / p * p] + i % p) return NOT_CONSECUTIVE;
    l->n /= p;
    for (int64_t i = 0; i < l->n; i++)
        if ((l->at[i] = l->at[i * p] / p) < 0 || l->at[i] >= limit) return OUT_OF_RANGE;
    for (int64_t i = 0; is_destination && i < l->n; i++)
        for (int64_t k = 0; k < i; k++)
            if (l->at[k] == l->at[i]) return WRITTEN_TWICE;
    return NO_REASON;
}

static int destination(const Case *t) { return t->direction % 2 ? DEVICE : HOST; }

/* 0, or why a transfer must be refused. Lists of indices become lists of pages. */
static int refused(const Group *g, Case *t) {
    if (layout_refused(g)) return LAYOUT;
    if (t->items[HOST].n != t->items[DEVICE].n) return UNEQUAL;
    int reason = list_refused(g, HOST, t->unit, destination(t) == HOST, &t->items[HOST]);
    return reason ? reason : list_refused(g, DEVICE, t->unit, destination(t) == DEVICE, &t->items[DEVICE]);
}

static int right_move(const Group *g, Case *t, uint8_t **bytes[2]) {
    int to = destination(t), reason = refused(g, t);
    for (int64_t k = 0; k < t->items[to].n && !reason; k++)
        for (int64_t b = 0; b < g->buffers[to]; b++)
            for (int64_t s = 0; s < g->buffers[!to]; s++)
                copy(g, t, to, &g->buffer[to][b], bytes[to][b], &g->buffer[!to][s], bytes[!to][s], t->items[to].at[k],
                     t->items[!to].at[k]);
    return reason;
}

/* ---- what you replace */

/* Do what `t` asks. bytes[side] has a pointer for each of g->buffer[side], `destination(t)` says which way, and t->unit
 * what t->items are. Return 0; UNSUPPORTED where you do not offer it; anything else where you refuse it, and then
 * nothing may have moved. `t` is a copy, so `refused(g, t)` may be used: it checks both lists, and makes indices pages. */
#ifdef MOVER
#include MOVER
#else
#define move right_move
#endif

/* ---- checking */

static int differs(const uint8_t *data, const Buffer *b, const char *digest) {
    char ours[65];
    sha256(data, b->bytes, ours);
    return strcmp(ours, digest) != 0;
}

static void print_place(const Component *c, int64_t layer, int64_t page, int64_t token, int64_t head, int64_t byte) {
    printf("component %d layer %d page %d token %d head %d byte %d", (int)c->id, (int)layer, (int)page, (int)token,
           (int)head, (int)byte);
}

/* The place that the word around a byte names. Fewer than eight bytes at the end of a head may name several. */
static void decode(const Group *g, const Buffer *b, const uint8_t *data, int64_t at) {
    int64_t inside = b->first + at % b->lanes, begin = inside / 8 * 8, end = begin + 8, found = 0;
    int64_t pages = g->pages[HOST] > g->pages[DEVICE] ? g->pages[HOST] : g->pages[DEVICE];
    if (data[at] == POISON) { printf("poison (nothing was written)"); return; }
    if (begin < b->first) begin = b->first;
    if (end > b->first + b->lanes) end = b->first + b->lanes;
    const uint8_t *word = data + at - (inside - begin);
    for (const Component *c = g->part; c < g->part + g->parts; c++) {
        int64_t lanes = c->lanes * c->element_bytes, tokens = c->unit == TOKEN ? g->page_size : 1;
        int64_t heads = c->heads ? c->heads : 1, rows = c->layers.n * pages * tokens * heads;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t first = begin % 8; first + end - begin <= lanes; first += 8) {
                int64_t layer = c->layers.at[row / heads / tokens / pages], page = row / heads / tokens % pages;
                int64_t k = begin;
                if (end - begin < 8 && first + end - begin < lanes) continue;
                while (k < end && payload(c->id, layer, page, row / heads % tokens, row % heads, first + k - begin) ==
                                      word[k - begin]) k++;
                if (k == end && !found++) print_place(c, layer, page, row / heads % tokens, row % heads, first);
            }
    }
    if (!found) printf("bytes of no place, 0x%02x first", data[at]);
    if (found > 1) printf(" (or one of %" PRId64 " others)", found - 1);
}

/* The first byte of a side that is not the right one. */
static void explain(const Group *g, int side, uint8_t **found[2], uint8_t **right[2]) {
    for (int64_t i = 0; i < g->buffers[side]; i++) {
        const Buffer *b = &g->buffer[side][i];
        int64_t byte = 0;
        while (byte < b->bytes && found[side][i][byte] == right[side][i][byte]) byte++;
        if (byte == b->bytes) continue;
        printf("%s buffer %" PRId64 ", byte %" PRId64 ": expected ", side == HOST ? "host" : "device", i, byte);
        decode(g, b, right[side][i], byte);
        printf(", found ");
        decode(g, b, found[side][i], byte);
        break;
    }
    printf("\n");
}

static List same(const List *l) {
    List copy = {l->n, malloc((l->n > 0 ? l->n : 1) * sizeof *l->at)};
    if (l->n > 0) memcpy(copy.at, l->at, l->n * sizeof *l->at);
    return copy;
}

static Case copied(const Case *t) {
    Case c = *t;
    c.layers = same(&t->layers), c.items[HOST] = same(&t->items[HOST]), c.items[DEVICE] = same(&t->items[DEVICE]);
    return c;
}

static void let_go_of(Case *t) { free(t->layers.at), free(t->items[HOST].at), free(t->items[DEVICE].at); }

/* A buffer of poison between guards. */
static uint8_t *guarded(int64_t bytes) {
    uint8_t *whole = malloc(GUARD + bytes + GUARD);
    memset(whole, GUARD_BYTE, GUARD + bytes + GUARD);
    return memset(whole + GUARD, POISON, bytes);
}

static void poison_both(const Group *g, uint8_t **bytes[2]) {
    for (int side = HOST; side <= DEVICE; side++) {
        bytes[side] = malloc((g->buffers[side] + 1) * sizeof(uint8_t *));
        for (int64_t i = 0; i < g->buffers[side]; i++) bytes[side][i] = guarded(g->buffer[side][i].bytes);
    }
}

static void fill_both(const Group *g, uint8_t **bytes[2]) {
    poison_both(g, bytes);
    for (int side = HOST; side <= DEVICE; side++)
        for (int64_t i = 0; i < g->buffers[side]; i++) fill(g, side, &g->buffer[side][i], bytes[side][i]);
}

/* All buffers of both sides, new ones, after `mover` has had them; and its answer. */
static int moved(const Group *g, const Case *t, int (*mover)(const Group *, Case *, uint8_t **[2]), uint8_t **filled[2],
                 uint8_t **bytes[2]) {
    int source = !destination(t);
    poison_both(g, bytes);
    for (int64_t i = 0; i < g->buffers[source]; i++)
        memcpy(bytes[source][i], filled[source][i], g->buffer[source][i].bytes);
    Case asked = copied(t);
    int answer = mover(g, &asked, bytes);
    let_go_of(&asked);
    return answer;
}

static void let_go(const Group *g, uint8_t **bytes[2]) {
    for (int side = HOST; side <= DEVICE; free(bytes[side++]))
        for (int64_t i = 0; i < g->buffers[side]; i++) free(bytes[side][i] - GUARD);
}

/* Whether a side is as it ought to be: every buffer with its digest, or without digests still poison. */
static int right_bytes(const Group *g, int side, uint8_t **bytes, char (*digests)[65]) {
    for (int64_t i = 0; i < g->buffers[side]; i++) {
        if (digests && differs(bytes[i], &g->buffer[side][i], digests[i])) return 0;
        for (int64_t k = 0; !digests && k < g->buffer[side][i].bytes; k++)
            if (bytes[i][k] != POISON) return 0;
    }
    return 1;
}

/* How many guards were written to. Of each, the byte nearest to the buffer is told. */
static int damaged(const Group *g, const char *id, uint8_t **bytes[2]) {
    int found = 0;
    for (int side = HOST; side <= DEVICE; side++)
        for (int64_t i = 0; i < g->buffers[side]; i++)
            for (int step = -1; step <= 1; step += 2) {
                const uint8_t *next = step < 0 ? bytes[side][i] - 1 : bytes[side][i] + g->buffer[side][i].bytes;
                int intact = 0;
                while (intact < GUARD && next[step * intact] == GUARD_BYTE) intact++;
                if (intact == GUARD) continue;
                found++;
                printf("%s: %s buffer %" PRId64 ": a write %d bytes %s the buffer\n", id,
                       side == HOST ? "host" : "device", i, intact + 1, step < 0 ? "before" : "behind");
            }
    return found;
}

static int nothing(const Group *g, Case *t, uint8_t **bytes[2]) { return (void)g, (void)t, (void)bytes, 1; }

/* 0 where it is right, 1 where it is wrong, or UNSUPPORTED. */
static int check_case(const Group *g, const Case *t, const char *id, uint8_t **filled[2]) {
    int to = destination(t), wrong = 0;
    uint8_t **bytes[2], **right[2];
    expect("sha256");
    int64_t count = number();
    if (count != (t->result == MUST_REFUSE ? 0 : g->buffers[to])) return printf("%s: %d digests\n", id, (int)count), 1;
    char(*digests)[65] = malloc((count + 1) * sizeof *digests), (*sources)[65] = malloc((g->buffers[!to] + 1) * 65);
    for (int64_t i = 0; i < count; i++) word(digests[i]);
    for (int64_t i = 0; i < g->buffers[!to]; i++) memcpy(sources[i], g->buffer[!to][i].filled, 65);

    Case asked = copied(t);
    int reason = refused(g, &asked);
    let_go_of(&asked);
    if (reason != t->reason) wrong = 1, printf("%s: reason %d, not %d\n", id, reason, (int)t->reason);

    int answer = moved(g, t, move, filled, bytes), still = answer != 0 || t->result == MUST_REFUSE;
    if (answer != UNSUPPORTED) {
        int answered = answer ? t->result != OK : t->result != MUST_REFUSE;
        int there = right_bytes(g, to, bytes[to], still ? NULL : digests);
        int kept = right_bytes(g, !to, bytes[!to], sources);
        if (!answered || !there || !kept) {
            wrong = 1;
            printf("%s: %s", id, answered ? "" : answer ? "was refused; " : "was not refused, though it must be; ");
            moved(g, t, still ? nothing : right_move, filled, right);
            explain(g, kept ? to : !to, bytes, right);
            let_go(g, right);
        }
        if (damaged(g, id, bytes)) wrong = 1;
    }
    let_go(g, bytes), free(digests), free(sources);
    return answer == UNSUPPORTED && !wrong ? UNSUPPORTED : wrong;
}

static char id[128]; /* of what is being checked */

static void died(int sent) {
    printf("%s: died of signal %d; if it wrote far beside a buffer, -g -fsanitize=address tells where\n", id, sent);
    fflush(stdout);
    _Exit(1);
}

int main(int files, char **names) {
    int64_t checked = 0, wrong = 0, unsupported = 0;
    static char line[1 << 12];
    setvbuf(stdout, line, _IOLBF, sizeof line); /* so that `died` can print when malloc no longer works */
    signal(SIGSEGV, died), signal(SIGABRT, died);
    if (files < 2) {
        fprintf(stderr, "no files: %s data/vectors/mha.txt ...\n"
                        "Offsets cut to 32 bits and page numbers cut to 16 pass; "
                        "see \"What they cannot show\" in README.md there\n", names[0]);
        return 2;
    }
    for (int f = 1; f < files; f++) {
        if (!(in = fopen(names[f], "r"))) { perror(names[f]); return 2; }
        expect("vectors");
        if (number() != VERSION) { fprintf(stderr, "%s has another version\n", names[f]); return 2; }
        int64_t groups = number(), left = number();
        while (groups--) {
            Group g = read_group(id);
            uint8_t **filled[2];
            fill_both(&g, filled);
            for (int side = HOST; side <= DEVICE; side++)
                for (int64_t i = 0; i < g.buffers[side]; i++)
                    if (differs(filled[side][i], &g.buffer[side][i], g.buffer[side][i].filled))
                        wrong++, printf("%s: filled buffers\n", id);
            for (int64_t i = 0; i < g.cases; i++, checked++, left--) {
                Case t = read_case(id);
                int verdict = check_case(&g, &t, id, filled);
                wrong += verdict == 1, unsupported += verdict == UNSUPPORTED;
                let_go_of(&t);
            }
            let_go(&g, filled);
        }
        if (left) wrong++, printf("%s: %" PRId64 " cases are missing\n", names[f], left);
        fclose(in);
    }
    printf("%" PRId64 " cases checked, %" PRId64 " wrong", checked, wrong);
    if (unsupported) printf(", %" PRId64 " unsupported", unsupported);
    printf("\n");
    return wrong || checked == unsupported;
}
