// The online softmax of rows whose keys two consumers share: each has the weights of its own tile, and both have the
// same base.
//
// A weight is 2^((score - base) factor). The base of a row rises to its largest score where that would weigh more than
// 2^ROOM, so that weights of 16 bits, and their sums, keep their digits, and rows rarely rise. The base is taken off
// first: a large score is not rounded before.
constexpr float ROOM = 8;
constexpr bool FOLD = true;  // the factor is a part of the exponential

struct Softmax {
    float base[2] = {-LOWEST, -LOWEST};  // of a row that has seen nothing
    float total[2] = {0, 0};             // of this consumer's weights

    DEVICE bool is_seen(int m) const { return base[m] != -LOWEST; }
    // The base in the unit of the exponential.
    DEVICE float exponent(int m, float factor) const { return rounded(base[m], factor); }

    // The largest of the thread's scores in a row.
    static DEVICE float most(const Scores& scores, int m) {
        float most = -INFINITE;
        UNROLL for (int n = 0; n < BLOCK_N / 2; n++)
            if (n / 2 % 2 == m) most = largest(most, scores[n]);
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
    DEVICE void weigh(Weights& weights, const Scores& scores, float factor) {
        UNROLL for (int k = 0; k < BLOCK_N / 16; k++)
            UNROLL for (int r = 0; r < 4; r++) {
                const int n = 8 * k + 2 * r, m = r % 2;
                const float even = power((scores[n] - base[m]) * factor);
                const float odd = power((scores[n + 1] - base[m]) * factor);
                total[m] += even, total[m] += odd;
                weights[k][r] = pack_pair<T>(even, odd);
            }
    }
};
