# Keeps one throwaway server: makes its directory, obeys the commands that come in by stdin, and cleans up when stdin
# ends, which it also does when the process at its other end is killed. Run by postgres.rs as
#   sh -c <this> scriba-postgres <directory of initdb and postgres> <lines for postgresql.conf>
# Every answer is one line: `ok` or `failed`, and a detail.
umask 077
bin=$1 settings=$2 dir='' pid=''

# The server is a child of this script, so that it is also reaped here and not left to the first process of a container.
start() {
  "$bin/postgres" -D data -p "$1" </dev/null >>log 2>&1 &
  pid=$!
  tries=0
  # The first line of this file is the server's process id, the eighth its status.
  until [ "$(sed -n '1p;8p' data/postmaster.pid 2>/dev/null | tr -d ' \n')" = "${pid}ready" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 1200 ] || ! kill -0 "$pid" 2>/dev/null; then
      stop
      return 1
    fi
    sleep 0.05
  done
}

stop() {
  [ -n "$pid" ] || return 0
  kill -QUIT "$pid" 2>/dev/null
  wait "$pid" 2>/dev/null
  pid=''
}

finish() {
  stop
  cd /
  [ -z "$dir" ] || rm -rf "$dir"
}
trap finish EXIT
trap exit HUP INT TERM
# An answer that nobody reads must not end this script before it has cleaned up.
trap '' PIPE

dir=$(mktemp -d "${TMPDIR:-/tmp}/scriba-postgres.XXXXXX" 2>/dev/null || mktemp -d /tmp/scriba-postgres.XXXXXX) || exit
cd "$dir" || exit
if "$bin/initdb" -D data --no-sync -A trust -U postgres --locale=C --encoding=UTF8 </dev/null >log 2>&1 &&
  printf "unix_socket_directories = '%s'\n%s\n" "$dir" "$settings" >>data/postgresql.conf; then
  echo "ok $dir"
else
  echo "failed $dir"
fi

while read -r command port; do
  case $command in
    start) if start "$port"; then echo "ok $pid"; else echo "failed to start"; fi ;;
    stop)
      stop
      echo ok
      ;;
  esac
done
