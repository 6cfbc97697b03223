# The client of the network's benchmark: the same script, with nothing but what perl has built in, runs in a sandbox and
# beside it. The server holds the clock.
my ($host, $port, $what, $count, $size) = @ARGV;
my $piece = 262144;
sub dial {
    socket(my $peer, 2, 1, 6) or die "socket: $!";
    connect($peer, pack('S n C4 x8', 2, $port, split(/\./, $host))) or die "connect: $!";
    $peer;
}
sub order { my ($peer, $kind) = @_; syswrite($peer, pack('A1 Q>', $kind, $size)) == 9 or die "order: $!" }
sub put {
    my ($peer, $left, $data) = ($_[0], $size, 'x' x $piece);
    while ($left > 0) { my $wrote = syswrite($peer, $data, $left < $piece ? $left : $piece) or die "write: $!"; $left -= $wrote }
}
sub get {
    my ($peer, $left, $data) = @_;
    while ($left > 0) { my $read = sysread($peer, $data, $piece) or die "read: $!"; $left -= $read }
}
if ($what eq 'send') { my $peer = dial(); order($peer, 'S'); put($peer); get($peer, 1) }
if ($what eq 'receive') { my $peer = dial(); order($peer, 'R'); get($peer, $size); syswrite($peer, 'x') }
if ($what eq 'dial') { for (1 .. $count) { my $peer = dial(); order($peer, 'S'); put($peer); get($peer, 1); close $peer } }
if ($what eq 'many') {
    my %peers = map { my $peer = dial(); order($peer, 'R'); (fileno($peer) => [$peer, $size]) } 1 .. $count;
    while (%peers) {
        my ($wanted, $data) = ('');
        vec($wanted, $_, 1) = 1 for keys %peers;
        select($wanted, undef, undef, undef);
        for my $at (grep { vec($wanted, $_, 1) } keys %peers) {
            my $read = sysread($peers{$at}[0], $data, $piece) or die "read: $!";
            next if ($peers{$at}[1] -= $read) > 0;
            syswrite($peers{$at}[0], 'x');
            delete $peers{$at};
        }
    }
}
