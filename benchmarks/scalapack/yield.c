/* MPI calls that wait, made to give the processor away meanwhile.
 *
 * MPICH spins. With more ranks than cores a spinning rank keeps the one that it waits for from running, and what is
 * measured is the scheduler; Open MPI yields then by itself. These stand in front of the library's calls, for
 * ScaLAPACK's too; with a core for each rank they spin as MPICH does. */
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

int yields(void) {
  static int known = -1;
  if (known < 0) {
    int ranks = 1;
    PMPI_Comm_size(MPI_COMM_WORLD, &ranks);
    known = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  }
  return known;
}

static int wait_for(MPI_Request *request, MPI_Status *status) {
  int done = 0, error;
  while ((error = PMPI_Test(request, &done, status)) == MPI_SUCCESS && !done) sched_yield();
  return error;
}

#define WAIT(spinning, begin)                 \
  if (!yields()) return spinning;             \
  MPI_Request request;                        \
  int error = begin;                          \
  return error ? error : wait_for(&request, MPI_STATUS_IGNORE)

int MPI_Recv(void *p, int n, MPI_Datatype t, int from, int tag, MPI_Comm comm, MPI_Status *status) {
  if (!yields()) return PMPI_Recv(p, n, t, from, tag, comm, status);
  MPI_Request request;
  int error = PMPI_Irecv(p, n, t, from, tag, comm, &request);
  return error ? error : wait_for(&request, status);
}

int MPI_Send(const void *p, int n, MPI_Datatype t, int to, int tag, MPI_Comm comm) {
  WAIT(PMPI_Send(p, n, t, to, tag, comm), PMPI_Isend(p, n, t, to, tag, comm, &request));
}

int MPI_Sendrecv(const void *p, int n, MPI_Datatype t, int to, int tag, void *q, int count, MPI_Datatype type, int from,
                 int its_tag, MPI_Comm comm, MPI_Status *status) {
  if (!yields()) return PMPI_Sendrecv(p, n, t, to, tag, q, count, type, from, its_tag, comm, status);
  MPI_Request in, out;
  int error = PMPI_Irecv(q, count, type, from, its_tag, comm, &in);
  if (!error) error = PMPI_Isend(p, n, t, to, tag, comm, &out);
  if (!error) error = wait_for(&in, status);
  return error ? error : wait_for(&out, MPI_STATUS_IGNORE);
}

int MPI_Wait(MPI_Request *request, MPI_Status *status) {
  return yields() ? wait_for(request, status) : PMPI_Wait(request, status);
}

int MPI_Waitall(int n, MPI_Request requests[], MPI_Status statuses[]) {
  if (!yields()) return PMPI_Waitall(n, requests, statuses);
  int done = 0, error;
  while ((error = PMPI_Testall(n, requests, &done, statuses)) == MPI_SUCCESS && !done) sched_yield();
  return error;
}

int MPI_Barrier(MPI_Comm comm) { WAIT(PMPI_Barrier(comm), PMPI_Ibarrier(comm, &request)); }

int MPI_Bcast(void *p, int n, MPI_Datatype t, int root, MPI_Comm comm) {
  WAIT(PMPI_Bcast(p, n, t, root, comm), PMPI_Ibcast(p, n, t, root, comm, &request));
}

int MPI_Reduce(const void *p, void *q, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm comm) {
  WAIT(PMPI_Reduce(p, q, n, t, op, root, comm), PMPI_Ireduce(p, q, n, t, op, root, comm, &request));
}

int MPI_Allreduce(const void *p, void *q, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm) {
  WAIT(PMPI_Allreduce(p, q, n, t, op, comm), PMPI_Iallreduce(p, q, n, t, op, comm, &request));
}
