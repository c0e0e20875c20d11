(() => {
'use strict';
const KINDS = {f: 'forward', b: 'backward', i: 'backward, inputs',
               w: 'backward, weights'};
const CONTROLS = `<div class="controls">
<button type="button" class="previous" aria-label="Previous step">\u2039</button>
<button type="button" class="play" aria-label="Play">Play</button>
<button type="button" class="next" aria-label="Next step">\u203a</button>
<input type="range" min="1" max="1" value="1" aria-label="Step">
<output></output><select aria-label="What to play"></select></div>
<div class="scene" tabindex="0" role="region"
aria-label="The devices at this step"></div>`;
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  element.className = name;
  if (text) element.textContent = text;
  return element;
};

// A picture of the page's data (pipeline_picture.cpp), with its drawing. Times
// are per cent of the axis.
function read(data, range) {
  const figure = document.getElementById(data.id);
  const svg = figure.querySelector('.plot > svg');
  const drawn = new Map();  // rectangles and their blocks
  const lines = [...svg.querySelectorAll('.prow')];
  const rows = data.rows.map(({name, group, blocks}, row) => {
    const boxes = lines[row].querySelectorAll('rect:not(.gap)');
    const all = blocks.map(([kind, m, s, begin, length], i) => {
      const block = {row, kind, m, s, begin, end: begin + length};
      drawn.set(boxes[i], block);
      return block;
    });
    return {name, group, blocks: all.filter(block => block.kind !== 't')};
  });
  return {...data, range, figure, svg, drawn, rows, chains: chains(rows)};
}

// The way of each microbatch: its passes in order, but for weights' gradients,
// which leave the device nowhere.
function chains(rows) {
  const all = new Map();
  for (const row of rows) {
    for (const block of row.blocks) {
      if (block.kind === 'w') continue;
      const key = row.group + ' ' + block.m;
      if (!all.has(key)) all.set(key, {group: row.group, m: block.m, blocks: []});
      all.get(key).blocks.push(block);
    }
  }
  for (const chain of all.values()) {
    chain.blocks.sort((a, b) => a.begin - b.begin);
  }
  return [...all.values()].sort((a, b) => a.m - b.m);
}

const running = (blocks, time) =>
    blocks.find(b => b.begin <= time && time < b.end);

// Forwards begun whose backward has not ended: their activations are kept.
function kept(row, time) {
  const parts = new Set();
  for (const b of row.blocks) {
    if (b.kind === 'f' && b.begin <= time) parts.add(b.s + ' ' + b.m);
  }
  for (const b of row.blocks) {
    if ((b.kind === 'b' || b.kind === 'w') && b.end <= time) {
      parts.delete(b.s + ' ' + b.m);
    }
  }
  return parts.size;
}

// Where a microbatch is: at work in a row, or waiting for its next one.
function spot(chain, time) {
  const block = running(chain.blocks, time);
  if (block) return {row: block.row, kind: block.kind, works: true};
  const next = chain.blocks.findIndex(b => b.begin > time);
  if (next < 1) return null;  // not yet begun, or done
  const {row, kind} = chain.blocks[next];
  return {row, kind, works: false};
}

class Scene {
  constructor(root, picture) {
    this.picture = picture;
    root.textContent = '';
    this.devices = [];
    this.lines = new Map();
    for (const row of picture.rows) {
      if (!this.lines.has(row.group)) {
        const heading = picture.headings[this.lines.size];
        if (heading) root.append(make('div', 'line-name', heading));
        this.lines.set(row.group, root.appendChild(make('div', 'devices')));
      }
      this.devices.push(this.device(row));
    }
    this.tokens = picture.chains.map(chain => {
      const token = make('i', 'token', chain.m < 0 ? '\u2022' : String(chain.m));
      this.lines.get(chain.group).append(token);
      return token;
    });
    const ways = root.appendChild(make('div', 'ways'));
    const looped = picture.rows.some(
        row => new Set(row.blocks.map(block => block.s)).size > 1);
    const stored = make('span', '');
    stored.append(make('i', ''), ' activations kept for the backward');
    ways.append(make('span', '', looped ? 'Each device holds several stages: '
        + 'microbatches pass it several times.' : 'activations move on \u2192'),
        stored, make('span', '', looped ? '' : '\u2190 gradients come back'));
  }

  device(row) {
    const box = this.lines.get(row.group).appendChild(make('div', 'device'));
    const parts = {queue: make('div', 'queue'), slot: make('div', 'slot'),
                   who: make('div', 'who', row.name),
                   kept: make('div', 'kept')};
    parts.more = parts.queue.appendChild(make('span', 'more'));
    box.append(parts.queue, parts.slot, parts.who, parts.kept);
    return {box, ...parts};
  }

  show(time) {
    const {rows, chains} = this.picture;
    let working = 0;
    rows.forEach((row, i) => {
      const block = running(row.blocks, time);
      const {slot, kept: store, box} = this.devices[i];
      slot.className = 'slot' + (block ? ' ' + block.kind : '');
      slot.textContent = block ? this.words(block, box) : 'idle';
      if (block && block.kind === 'w' && block.m >= 0) {
        slot.append(make('b', '', String(block.m)));
      }
      if (block) ++working;
      const count = kept(row, time);
      store.textContent = 'keeps ' + count + ' ';
      const dots = make('span', '');
      for (let n = 0; n < Math.min(count, 8); ++n) dots.append(make('i', ''));
      store.append(dots);
    });
    const waiting = this.devices.map(() => 0);
    chains.forEach((chain, i) => {
      this.move(this.tokens[i], spot(chain, time), waiting);
    });
    this.devices.forEach((device, i) => {
      const over = waiting[i] - this.room(device);
      device.more.textContent = over > 0 ? '+' + over : '';
    });
    return working;
  }

  words(block, box) {
    if (box.clientWidth < 110) {
      return box.clientWidth < 72 ? block.kind.toUpperCase()
                                  : KINDS[block.kind].replace('backward, ', '');
    }
    return KINDS[block.kind];
  }

  columns(device) { return Math.max(1, Math.floor(device.box.clientWidth / 26)); }
  // The last place of a full queue says how many more there are.
  room(device) { return 2 * this.columns(device) - 1; }

  move(token, at, waiting) {
    if (!at) {
      token.classList.remove('shown', 'work');
      return;
    }
    const device = this.devices[at.row];
    const {box} = device;
    let x = box.offsetLeft + box.clientWidth / 2 - 12;
    let y = device.slot.offsetTop + 31;
    let shown = true;
    if (!at.works) {
      const index = waiting[at.row]++;
      const columns = this.columns(device);
      x = box.offsetLeft + 26 * (index % columns)
          + Math.max(0, (box.clientWidth - 26 * columns) / 2);
      y = device.slot.offsetTop - 26 - 24 * Math.floor(index / columns);
      shown = index < this.room(device);
    }
    const entering = !token.classList.contains('shown');
    if (entering) token.style.transition = 'opacity .2s';
    token.style.transform = `translate(${x}px,${y}px)`;
    if (entering) {
      token.offsetWidth;
      token.style.transition = '';
    }
    token.classList.toggle('shown', shown);
    token.classList.toggle('work', at.works);
    token.classList.toggle('back', at.kind !== 'f');
    token.dataset.row = at.row;
  }
}

class Player {
  constructor(root, pictures, first) {
    const find = selector => root.querySelector(selector);
    root.innerHTML = CONTROLS;
    this.pictures = pictures;
    this.root = root;
    this.slider = find('input');
    this.output = find('output');
    this.button = find('.play');
    this.choice = find('select');
    this.timer = 0;
    find('.previous').onclick = () => { this.pause(); this.go(this.step - 1); };
    find('.next').onclick = () => { this.pause(); this.go(this.step + 1); };
    this.button.onclick = () => this.timer ? this.pause() : this.play();
    this.slider.oninput = () => { this.pause(); this.go(+this.slider.value); };
    pictures.forEach(({name}, i) => this.choice.add(
        new Option(name, i, i === first, i === first)));
    this.choice.hidden = pictures.length < 2;
    this.choice.onchange = () => {
      this.pause();
      this.choose(+this.choice.value);
    };
    addEventListener('resize', () => this.scene.show(this.time()));
    this.choose(first);
    this.mark(false);  // the pictures are whole stills until someone plays
  }

  choose(index) {
    this.picture = this.pictures[index];
    this.scene = new Scene(this.root.querySelector('.scene'), this.picture);
    this.slider.max = this.picture.steps.length;
    this.go(1);
  }

  time() { return this.picture.steps[this.step - 1]; }

  mark(on) {
    for (const {figure} of this.pictures) {
      figure.classList.toggle('playing', on);
    }
  }

  go(step) {
    const {steps, unit, range} = this.picture;
    this.step = Math.min(Math.max(1, step), steps.length);
    const at = this.time();
    this.slider.value = this.step;
    for (const {svg} of this.pictures) {
      const cursor = svg.querySelector('.cursor');
      cursor.setAttribute('x1', at + '%');
      cursor.setAttribute('x2', at + '%');
    }
    this.mark(true);
    const working = this.scene.show(at);
    const all = this.picture.rows.length;
    const time = unit ? '' : ', ' + seconds(at / 100 * range);
    this.output.textContent = '';
    this.output.append(make('b', '', 't = ' + this.step),
                       ` of ${steps.length}${time}`);
    this.slider.setAttribute('aria-valuetext',
        `step ${this.step} of ${steps.length}: ${working} of ${all} compute`);
  }

  play() {
    if (this.step === this.picture.steps.length) this.go(1);
    this.label('Pause');
    this.timer = setInterval(() => {
      this.go(this.step + 1);
      if (this.step === this.picture.steps.length) this.pause();
    }, 800);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.label('Play');
  }

  label(text) {
    this.button.textContent = text;
    this.button.setAttribute('aria-label', text);
  }
}

function seconds(time) {
  const [scale, name] = time < 1e-3 ? [1e6, '\u00b5s']
      : time < 1 ? [1e3, 'ms'] : [1, 's'];
  return (time * scale).toPrecision(3) + ' ' + name;
}

// Blocks of large pictures have no title of their own.
function hover({svg, drawn, range, unit}) {
  const tip = make('div', 'tip');
  svg.addEventListener('mousemove', event => {
    const block = drawn.get(event.target);
    if (!block || event.target.firstChild) return tip.remove();
    const {kind, m, s, begin, end} = block;
    const length = (end - begin) / 100 * range;
    tip.textContent = (KINDS[kind] || 'transfer') + (m < 0 ? '' : ' of ' + m)
        + (s < 0 ? '' : ', stage ' + s) + ', '
        + (unit ? +length.toPrecision(3) + ' ' + unit : seconds(length));
    document.body.append(tip);
    tip.style.left = Math.min(event.clientX + 12,
        innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = event.clientY + 16 + 'px';
  });
  svg.addEventListener('mouseleave', () => tip.remove());
}

document.querySelectorAll('.pipes').forEach(pipes => {
  const data = JSON.parse(pipes.querySelector('script').textContent);
  const pictures = data.pictures.map(picture => read(picture, data.range));
  pictures.forEach(hover);
  new Player(pipes.appendChild(make('div', 'player')), pictures, data.first);
});
})();
