// The online softmax of rows whose keys two consumers share: each has the weights of its own tile, and both have the
// same base.
//
// A weight is 2^((score - base) factor). The base of a row rises to its largest score where that would weigh more than
// 2^ROOM, so that weights of 16 bits, and their sums, keep their digits, and rows rarely rise. The base is taken off
// first: a large score is not rounded before.
constexpr float ROOM = 8;
constexpr bool FOLD = true;  // the factor is a part of the exponential

// Of ROWS that a thread has scores of: two where rows are the product's rows, four where they are its columns.
template <int ROWS> struct Softmax {
    float base[ROWS], total[ROWS];  // `total` is of this thread's weights

    DEVICE Softmax() {
        UNROLL for (int m = 0; m < ROWS; m++) base[m] = -LOWEST, total[m] = 0;  // of a row that has seen nothing
    }
    // Which of them score n is of.
    static constexpr DEVICE int row_in(int n) { return ROWS == 2 ? n / 2 % 2 : n / 4 * 2 + n % 2; }
    DEVICE bool is_seen(int m) const { return base[m] != -LOWEST; }
    // The base in the unit of the exponential.
    DEVICE float exponent(int m, float factor) const { return rounded(base[m], factor); }

    // The largest of the thread's scores in a row.
    template <int COUNT> static DEVICE float most(const float (&scores)[COUNT], int m) {
        float most = -INFINITE;
        UNROLL for (int n = 0; n < COUNT; n++)
            if (row_in(n) == m) most = largest(most, scores[n]);
        return most;
    }
    // Whether the base of row m rises to score `most`; sums are then to be multiplied by `rescale`.
    DEVICE bool rise(int m, float most, float factor, float& rescale) {
        rescale = 1;
        if (is_seen(m) ? !((most - base[m]) * factor > ROOM) : !(most > -INFINITE)) return false;
        const float next = most + (most - most);  // of inf, NaN
        rescale = is_seen(m) ? power((base[m] - next) * factor) : 0;
        base[m] = next;
        total[m] *= rescale;
        return true;
    }
    template <int COUNT> DEVICE void weigh(u32 (&weights)[COUNT][4], const float (&scores)[8 * COUNT], float factor) {
        UNROLL for (int k = 0; k < COUNT; k++)
            UNROLL for (int r = 0; r < 4; r++) {
                const int n = 8 * k + 2 * r, m = row_in(n), next = row_in(n + 1);
                const float even = power((scores[n] - base[m]) * factor);
                const float odd = power((scores[n + 1] - base[next]) * factor);
                total[m] += even, total[next] += odd;
                weights[k][r] = pack_pair<T>(even, odd);
            }
    }
};
