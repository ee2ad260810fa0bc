/* ScaLAPACK's pdgemm and psgemm, timed: C (M, N) = A (M, K) B (K, N), block-cyclic on a process grid.
 *
 *     mpiexec -n P*Q ./pgemm M N K NB P Q d|s REPEATS
 *
 * Rank 0 prints one line of JSON. A repetition's time runs from a barrier to the end of the slowest rank; the first
 * product warms up and is not in it. Elements are small integers, so that results are exact, and every product is
 * checked as a whole: C x = A (B x) for an integer vector x. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

void Cblacs_pinfo(int *, int *);
void Cblacs_get(int, int, int *);
void Cblacs_gridinit(int *, const char *, int, int);
void Cblacs_gridinfo(int, int *, int *, int *, int *);
void Cblacs_gridexit(int);
int numroc_(const int *, const int *, const int *, const int *, const int *);
void descinit_(int *, const int *, const int *, const int *, const int *, const int *, const int *, const int *,
               const int *, int *);
void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const void *,
             const int *, const int *, const int *, const void *, const int *, const int *, const int *,
             const double *, void *, const int *, const int *, const int *);
void psgemm_(const char *, const char *, const int *, const int *, const int *, const float *, const void *,
             const int *, const int *, const int *, const void *, const int *, const int *, const int *,
             const float *, void *, const int *, const int *, const int *);
void dgemm_(void);
int yields(void); /* yield.c */

static int a_at(int i, int j) { return (7 * i + 3 * j + i * j % 11) % 5 - 2; }
static int b_at(int i, int j) { return (5 * i + 2 * j + i * j % 13) % 5 - 2; }
static int x_at(int j) { return j * 5 % 7 - 3; }

static int nb, is_double;

/* The global index of local index `at` on process `me` of `count`. */
static int global(int at, int me, int count) { return (at / nb * count + me) * nb + at % nb; }

static double get(const void *p, size_t at) { return is_double ? ((const double *)p)[at] : ((const float *)p)[at]; }
static void put(void *p, size_t at, double value) {
  if (is_double)
    ((double *)p)[at] = value;
  else
    ((float *)p)[at] = (float)value;
}

static void *need(size_t count, size_t size) {
  void *found = calloc(count ? count : 1, size);
  if (!found) {
    fprintf(stderr, "out of memory: %zu bytes\n", count * size);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return found;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, ranks, context, my_row, my_col, zero = 0, one = 1, info;
  Cblacs_pinfo(&rank, &ranks);
  if (argc != 9) {
    if (!rank) fprintf(stderr, "usage: pgemm M N K NB P Q d|s REPEATS\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  int m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]), rows = atoi(argv[5]), cols = atoi(argv[6]);
  int repeats = atoi(argv[8]);
  nb = atoi(argv[4]);
  is_double = argv[7][0] == 'd';
  if (m < 1 || n < 1 || k < 1 || nb < 1 || rows < 1 || cols < 1 || rows * cols != ranks || repeats < 1) {
    if (!rank) fprintf(stderr, "sizes, tile and repeats must be positive, and P x Q the number of processes\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  size_t size = is_double ? sizeof(double) : sizeof(float);
  Cblacs_get(-1, 0, &context);
  Cblacs_gridinit(&context, "Row", rows, cols);
  Cblacs_gridinfo(context, &rows, &cols, &my_row, &my_col);

  int m_here = numroc_(&m, &nb, &my_row, &zero, &rows), n_here = numroc_(&n, &nb, &my_col, &zero, &cols);
  int k_in_row = numroc_(&k, &nb, &my_col, &zero, &cols), k_in_col = numroc_(&k, &nb, &my_row, &zero, &rows);
  int lda = m_here > 1 ? m_here : 1, ldb = k_in_col > 1 ? k_in_col : 1;
  int desc_a[9], desc_b[9], desc_c[9];
  descinit_(desc_a, &m, &k, &nb, &nb, &zero, &zero, &context, &lda, &info);
  descinit_(desc_b, &k, &n, &nb, &nb, &zero, &zero, &context, &ldb, &info);
  descinit_(desc_c, &m, &n, &nb, &nb, &zero, &zero, &context, &lda, &info);
  void *a = need((size_t)lda * k_in_row, size), *b = need((size_t)ldb * n_here, size);
  void *c = need((size_t)lda * n_here, size);
  for (int j = 0; j < k_in_row; j++)
    for (int i = 0; i < m_here; i++)
      put(a, (size_t)j * lda + i, a_at(global(i, my_row, rows), global(j, my_col, cols)));
  for (int j = 0; j < n_here; j++)
    for (int i = 0; i < k_in_col; i++)
      put(b, (size_t)j * ldb + i, b_at(global(i, my_row, rows), global(j, my_col, cols)));

  double *bx = need(k, sizeof(double)), *expected = need(lda, sizeof(double)), *found = need(lda, sizeof(double));
  for (int p = 0; p < k; p++)
    for (int j = 0; j < n; j++) bx[p] += b_at(p, j) * x_at(j);
  for (int i = 0; i < m_here; i++)
    for (int p = 0; p < k; p++) expected[i] += a_at(global(i, my_row, rows), p) * bx[p];
  MPI_Comm mesh_row;
  MPI_Comm_split(MPI_COMM_WORLD, my_row, my_col, &mesh_row);

  double *times = need(repeats, sizeof(double)), worst = 0;
  for (int repetition = -1; repetition < repeats; repetition++) {
    double d1 = 1, d0 = 0;
    float s1 = 1, s0 = 0;
    for (size_t at = 0; at < (size_t)lda * n_here; at++) put(c, at, -1e6); /* every element is to be written */
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    if (is_double)
      pdgemm_("N", "N", &m, &n, &k, &d1, a, &one, &one, desc_a, b, &one, &one, desc_b, &d0, c, &one, &one, desc_c);
    else
      psgemm_("N", "N", &m, &n, &k, &s1, a, &one, &one, desc_a, b, &one, &one, desc_b, &s0, c, &one, &one, desc_c);
    double took = MPI_Wtime() - start, slowest;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (repetition >= 0) times[repetition] = slowest;
    for (int i = 0; i < m_here; i++) found[i] = 0;
    for (int j = 0; j < n_here; j++) {
      double x = x_at(global(j, my_col, cols));
      for (int i = 0; i < m_here; i++) found[i] += get(c, (size_t)j * lda + i) * x;
    }
    MPI_Allreduce(MPI_IN_PLACE, found, m_here, MPI_DOUBLE, MPI_SUM, mesh_row);
    for (int i = 0; i < m_here; i++) {
      double error = found[i] - expected[i];
      error = error < 0 ? -error : error;
      if (!(error <= worst)) worst = error; /* also where it is not a number */
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (!rank) {
    Dl_info library = {0};
    dladdr((void *)dgemm_, &library);
    char *(*config)(void) = (char *(*)(void))dlsym(RTLD_DEFAULT, "openblas_get_config");
    char *(*core)(void) = (char *(*)(void))dlsym(RTLD_DEFAULT, "openblas_get_corename");
    int (*threads)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "openblas_get_num_threads");
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(mpi, &length);
    for (int i = 0; i < length; i++)
      if (mpi[i] < ' ' || mpi[i] == '"' || mpi[i] == '\\') mpi[i] = mpi[i] == '\n' ? '\0' : ' ';
    printf("{\"times_s\": [");
    for (int i = 0; i < repeats; i++) printf("%s%.9f", i ? ", " : "", times[i]);
    printf("], \"error\": %.17g, \"blas\": \"%s\", \"openblas\": \"%s\", \"core\": \"%s\", \"threads\": %d, "
           "\"mpi\": \"%s\", \"yields\": %s}\n",
           worst, library.dli_fname ? library.dli_fname : "unknown", config ? config() : "", core ? core() : "",
           threads ? threads() : 0, mpi, yields() ? "true" : "false");
  }
  Cblacs_gridexit(context);
  MPI_Finalize();
  return worst == 0 ? 0 : 3;
}
