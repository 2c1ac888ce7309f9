// BIAS: whether a float mask is added to scores, and what it has for queries.
#pragma once

// None; a row for each query, of which TMA brings tiles; one row that all queries share.
enum { NO_BIAS, BIAS_OF_ROWS, BIAS_OF_ALL };
