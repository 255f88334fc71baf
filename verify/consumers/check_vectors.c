/* Check golden vectors in plain C99: cc -O2 check_vectors.c -o check_vectors && ./check_vectors data/vectors/mha.txt ...
 *
 * Reads the lines of numbers that data/vectors/README.md describes, works out every destination by its own arithmetic
 * and compares SHA-256. To check your own implementation instead, let it write what `transfer` writes. */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, PAGE_UNIFIED, PAGE_FIRST_KV_SPLIT };
enum { NO_REASON, LAYOUT, UNEQUAL, PARTIAL_PAGE, MISALIGNED, NOT_CONSECUTIVE, OUT_OF_RANGE, WRITTEN_TWICE };
enum { PAGES, INDICES, ENTRIES };
enum { HOST, DEVICE };
enum { TOKEN, PAGE, SLOT };

typedef struct { int64_t n, *at; } List;
typedef struct { int64_t id, kind, element_bytes, heads, lanes, unit, parts, entries; List widths, layers; } Component;
typedef struct { int64_t first, lanes, bytes; List components, layers; char filled[65]; } Buffer;
typedef struct {
    int64_t layout, page_size, pages[2], groups, parts, buffers[2], cases;
    Component *part;
    Buffer *buffer[2];
} Group;
typedef struct { int64_t direction, result, reason, unit; List layers, items[2]; } Case;

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

static int has(const List *l, int64_t value) {
    for (int64_t i = 0; i < l->n; i++)
        if (l->at[i] == value) return 1;
    return 0;
}

/* Write what page or entry `to` of a side gets from page or entry `from` of the other side. */
static void transfer(const Group *g, const Case *t, int side, const Buffer *b, uint8_t *out, int64_t to, int64_t from) {
    for (int64_t part = 0; part < b->components.n; part++) {
        const Component *c = &g->part[b->components.at[part]];
        for (int64_t i = 0; i < b->layers.n; i++) {
            int64_t layer = b->layers.at[i], begin = 0;
            if (t->layers.n >= 0 && !has(&t->layers, layer)) continue;
            if (t->unit == ENTRIES) {
                for (int64_t s = 0; s < c->widths.n; begin += c->entries * c->widths.at[s++])
                    for (int64_t k = 0, w = c->widths.at[s]; k < w; k++)
                        out[offset(g, side, b, part, i, to / c->entries, 0, 0, begin + to % c->entries * w + k)] =
                            payload(c->id, layer, from / c->entries, 0, 0, begin + from % c->entries * w + k);
                continue;
            }
            for (int64_t token = 0; token < (c->unit == TOKEN ? g->page_size : 1); token++)
                for (int64_t head = 0; head < (c->heads ? c->heads : 1); head++)
                    for (int64_t k = 0; k < b->lanes; k++)
                        out[offset(g, side, b, part, i, to, token, head, k)] =
                            payload(c->id, layer, from, token, head, b->first + k);
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

static int refused(const Group *g, Case *t, int to) {
    if (layout_refused(g)) return LAYOUT;
    if (t->items[HOST].n != t->items[DEVICE].n) return UNEQUAL;
    int reason = list_refused(g, HOST, t->unit, to == HOST, &t->items[HOST]);
    return reason ? reason : list_refused(g, DEVICE, t->unit, to == DEVICE, &t->items[DEVICE]);
}

/* ---- checking */

static uint8_t *poisoned(int64_t bytes) { return memset(malloc(bytes + 1), 0xFF, bytes + 1); }

static int differs(const uint8_t *data, const Buffer *b, const char *digest) {
    char ours[65];
    sha256(data, b->bytes, ours);
    return strcmp(ours, digest) != 0;
}

static int check_filled(const Group *g) {
    int wrong = 0;
    Case all = {0, 0, 0, PAGES, {-1, NULL}, {{0, NULL}, {0, NULL}}};
    for (int side = HOST; side <= DEVICE; side++)
        for (Buffer *b = g->buffer[side]; b < g->buffer[side] + g->buffers[side]; b++) {
            uint8_t *data = poisoned(b->bytes);
            for (int64_t page = 0; page < g->pages[side]; page++) transfer(g, &all, side, b, data, page, page);
            wrong |= differs(data, b, b->filled);
            free(data);
        }
    return wrong;
}

static int check_case(const Group *g, Case *t) {
    int to = t->direction % 2 ? DEVICE : HOST, wrong = refused(g, t, to) != t->reason;
    expect("sha256");
    int64_t digests = number();
    if (digests != (t->reason ? 0 : g->buffers[to])) return 1;
    for (int64_t i = 0; i < digests; i++) {
        Buffer *b = &g->buffer[to][i];
        char digest[128];
        word(digest);
        if (wrong) continue;
        uint8_t *data = poisoned(b->bytes);
        for (int64_t k = 0; k < t->items[to].n; k++) transfer(g, t, to, b, data, t->items[to].at[k], t->items[!to].at[k]);
        wrong |= differs(data, b, digest);
        free(data);
    }
    return wrong;
}

int main(int files, char **names) {
    int64_t checked = 0, wrong = 0;
    for (int f = 1; f < files; f++) {
        char id[128];
        if (!(in = fopen(names[f], "r"))) { perror(names[f]); return 2; }
        expect("vectors");
        if (number() != 1) { fprintf(stderr, "%s has another version\n", names[f]); return 2; }
        int64_t groups = number(), left = number();
        while (groups--) {
            Group g = read_group(id);
            if (check_filled(&g)) wrong++, printf("%s: filled buffers\n", id);
            for (int64_t i = 0; i < g.cases; i++, checked++, left--) {
                Case t = read_case(id);
                if (check_case(&g, &t)) wrong++, printf("%s\n", id);
            }
        }
        if (left) wrong++, printf("%s: %" PRId64 " cases are missing\n", names[f], left);
        fclose(in);
    }
    printf("%" PRId64 " cases checked, %" PRId64 " wrong\n", checked, wrong);
    return wrong || !checked;
}
